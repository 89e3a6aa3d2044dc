"""A model directory that cannot be opened is one clear line, whatever is wrong with it, wherever it is opened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fleuve.config.models import resolve_model
from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.modeling.loading import load_model
from fleuve.modeling.tokenizer import load_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a whole model, to be broken."""
    return Path(shutil.copytree(resolve_model("builtin:small"), tmp_path / "model"))


def _halve(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[: len(content) // 2])


def _make_directory(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).mkdir()


def _pickle(content: bytes) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / WEIGHTS).unlink()
        (directory / "pytorch_model.bin").write_bytes(content)

    return change


def _configure(**fields: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


@pytest.mark.parametrize(
    ("change", "names"),
    [
        pytest.param(_halve, WEIGHTS, id="truncated"),
        pytest.param(lambda d: (d / WEIGHTS).write_bytes(b""), WEIGHTS, id="empty"),
        pytest.param(lambda d: (d / WEIGHTS).write_bytes(b"\xff" * 999), WEIGHTS, id="garbage"),
        pytest.param(lambda d: (d / WEIGHTS).write_bytes(b"\x02\0\0\0\0\0\0\0{}"), "is missing", id="no tensors"),
        pytest.param(_make_directory, WEIGHTS, id="a directory"),
        pytest.param(lambda d: (d / WEIGHTS).unlink(), "", id="absent"),
        pytest.param(_pickle(b""), "pytorch_model.bin: a pickle", id="empty pickle"),
        pytest.param(_pickle(b"no pickle"), "pytorch_model.bin: a pickle", id="broken pickle"),
        pytest.param(lambda d: (d / "config.json").write_text("{"), "", id="broken config"),
        pytest.param(lambda d: (d / "config.json").write_text("[]"), "", id="config is a list"),
        pytest.param(_configure(model_type="nonsense"), "nonsense", id="unknown kind"),
        pytest.param(_configure(hidden_size="x"), "hidden_size", id="config of wrong types"),
        pytest.param(lambda d: (d / "adapter_config.json").write_text("{}"), "is an adapter", id="an adapter"),
        pytest.param(
            _configure(num_hidden_layers=9, layer_types=["full_attention"] * 9),
            "is missing",
            id="too few layers in the weights",
        ),
        pytest.param(_configure(vocab_size=7), "instead of (7", id="weights of other shapes"),
    ],
)
def test_a_model_that_cannot_be_read_is_one_line_naming_it(
    model: Path, change: Callable[[Path], None], names: str
) -> None:
    change(model)
    with pytest.raises(UserError) as caught:
        load_model(str(model), torch.float32)
    assert str(model) in str(caught.value)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("tokenizer.json", content) for content in ('{"a"', '{"a": 1}', "[]", "")),
        *(("tokenizer_config.json", content) for content in ('{"a"', "[]", "")),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_one_line_naming_it(model: Path, file: str, content: str) -> None:
    (model / file).write_text(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(model))
    assert str(model) in str(caught.value)
    assert "\n" not in str(caught.value)


def _trainer(model: Path, tmp_path: Path) -> list[str]:
    sections = {"run_dir": "run", "model": {"path": str(model)}, "data": {"train": "procedural:countdown"}}
    settings = Settings.model_validate(sections)
    options = {"settings": settings.model_dump(mode="json"), "weights_directory": str(tmp_path / "fleuve-weights")}
    return ["-m", "fleuve.train", json.dumps(options)]


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "serve": lambda model, _: ["-m", "fleuve", "serve", str(model), "--port", "0"],
    "engine": lambda model, _: ["-m", "fleuve.engine", json.dumps({"model": str(model)})],
    "trainer": _trainer,
}


@pytest.mark.parametrize(
    "who", [pytest.param(who, marks=pytest.mark.slow) if who == "engine" else who for who in COMMANDS]
)
def test_every_process_that_opens_a_broken_model_says_so_in_one_line_and_exits_with_2(
    who: str, model: Path, tmp_path: Path
) -> None:
    _halve(model)
    command = [sys.executable, *COMMANDS[who](model, tmp_path)]
    if who == "engine":  # by hand it would listen on a fixed port
        code = (
            f"import os, socket; s = socket.create_server(('127.0.0.1', 0)); s.set_inheritable(True); "
            f"os.execve({command[0]!r}, {command!r}, os.environ | {{'FLEUVE_SOCKET_FD': str(s.fileno())}})"
        )
        command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"error: {model / WEIGHTS}")
    assert not (tmp_path / "fleuve-weights").exists()


class _Bomb:
    """Pickled, it makes whoever opens it write a file."""

    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.crater),)


CODE = """
from pathlib import Path
Path({crater!r}).mkdir()
from transformers import LlamaConfig as TheirConfig, LlamaForCausalLM as TheirModel
"""


def _bomb(directory: Path, crater: Path) -> None:
    (directory / WEIGHTS).unlink()
    torch.save({"model.embed_tokens.weight": _Bomb(crater)}, directory / "pytorch_model.bin")


def _bomb_beside_an_index(directory: Path, crater: Path) -> None:
    _bomb(directory, crater)
    index = {"weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _bomb_by_name(directory: Path, crater: Path) -> None:
    """A configuration may name the file of its weights."""
    torch.save({"model.embed_tokens.weight": _Bomb(crater)}, directory / "adapter_model.bin")
    _configure(transformers_weights="adapter_model.bin")(directory)


def _code(directory: Path, crater: Path) -> None:
    (directory / "theirs.py").write_text(CODE.format(crater=str(crater)))
    classes = {"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.TheirModel"}
    _configure(model_type="theirs", auto_map=classes)(directory)


@pytest.mark.parametrize("plant", [_bomb, _bomb_beside_an_index, _bomb_by_name, _code])
def test_opening_a_model_runs_nothing_that_lies_in_its_directory(
    model: Path, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    crater = tmp_path / "crater"
    plant(model, crater)
    with pytest.raises(UserError) as caught:
        load_model(str(model), torch.float32)
    assert not crater.exists()
    assert "\n" not in str(caught.value)


def test_opening_a_tokenizer_runs_nothing_that_lies_in_its_directory(model: Path, tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    (model / "theirs.py").write_text(CODE.format(crater=str(crater)))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(model)).encode("1")  # by tokenizer.json
    assert not crater.exists()
