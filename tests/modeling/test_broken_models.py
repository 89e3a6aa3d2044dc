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
        pytest.param(_pickle(b""), "", id="empty pickle"),
        pytest.param(_pickle(b"no pickle"), "", id="broken pickle"),
        pytest.param(lambda d: (d / "config.json").write_text("{"), "", id="broken config"),
        pytest.param(lambda d: (d / "config.json").write_text("[]"), "", id="config is a list"),
        pytest.param(_configure(model_type="nonsense"), "nonsense", id="unknown kind"),
        pytest.param(_configure(hidden_size="x"), "hidden_size", id="config of wrong types"),
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


@pytest.mark.parametrize("who", COMMANDS)
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
