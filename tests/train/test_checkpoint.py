"""A checkpoint restores the trainer bit for bit, opens in transformers, and is whole or not there."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_batch, make_trainer, same_weights, save_tiny_model, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from fleuve.errors import UserError
from fleuve.train import checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_after_loading_are_those_that_would_have_followed(model: Path, tmp_path: Path, dtype: str) -> None:
    first = make_trainer(model, tmp_path / "a", trainer={"dtype": dtype})
    first.step(make_batch(seed=0))
    first.save(tmp_path / "checkpoint")
    second = make_trainer(model, tmp_path / "b", trainer={"dtype": dtype})
    second.step(make_batch(seed=9))  # whatever it held before is gone
    second.load(tmp_path / "checkpoint")
    for trainer in (first, second):
        assert trainer.version == 1
        trainer.step(make_batch(seed=1, version=1))
    assert same_weights(weights_of(first), weights_of(second))
    assert same_weights(first.optimizer.state(), second.optimizer.state())


def test_a_checkpoint_before_the_first_step_restores_an_empty_optimiser(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "a")
    trainer.save(tmp_path / "checkpoint")
    fresh = make_trainer(model, tmp_path / "b")
    trainer.step(make_batch())
    trainer.load(tmp_path / "checkpoint")
    for t in (trainer, fresh):
        t.step(make_batch(seed=1))
    assert same_weights(weights_of(trainer), weights_of(fresh))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_opens_the_model_with_its_own_attention(model: Path, tmp_path: Path, dtype: str) -> None:
    trainer = make_trainer(model, tmp_path / "w", trainer={"dtype": dtype})
    trainer.step(make_batch())
    trainer.save(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / checkpoint.MODEL
    assert "fleuve" not in (path / "config.json").read_text()
    opened = AutoModelForCausalLM.from_pretrained(path)
    assert opened.dtype == getattr(torch, dtype)
    for name, parameter in opened.named_parameters():
        assert torch.equal(parameter, weights_of(trainer)[name].to(parameter.dtype)), name
    assert opened(torch.tensor([[3, 4, 5]])).logits.shape[:2] == (1, 3)
    assert (
        AutoTokenizer.from_pretrained(path)("1+2")["input_ids"]
        == AutoTokenizer.from_pretrained(model)("1+2")["input_ids"]
    )


def test_opening_a_checkpoint_unpickles_nothing(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w")
    trainer.step(make_batch())
    trainer.save(tmp_path / "checkpoint")
    files = {p.name for p in (tmp_path / "checkpoint").rglob("*") if p.is_file()}
    assert not {f for f in files if f.endswith((".pt", ".bin", ".pkl", ".part"))}
    assert load_file(tmp_path / "checkpoint" / checkpoint.STATE).keys() == trainer.optimizer.state().keys()


def test_what_is_published_is_what_is_saved(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w", rollout={"dtype": "bfloat16"})
    trainer.step(make_batch())
    file = trainer.publish()
    assert file.version == 1
    published = load_file(file.path)
    assert published.keys() == weights_of(trainer).keys()
    assert all(torch.equal(published[n], w.bfloat16()) for n, w in weights_of(trainer).items())


_LIMITED = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tiny import make_batch, make_trainer
trainer = make_trainer(Path(sys.argv[2]), Path(sys.argv[3]) / "w")
trainer.step(make_batch())
path = Path(sys.argv[3]) / "checkpoint"
for limit in map(int, sys.argv[4:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        trainer.save(path)
        print(json.dumps({"error": None}))
    except OSError as error:
        print(json.dumps({"error": str(error), "left": path.exists()}))
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_names_the_path_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands for the disk: one stops the model's file, one the optimiser's, one neither."""
    arguments = [str(Path(__file__).parent), str(model), str(tmp_path), "50000", "200000", "10000000"]
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    small, larger, enough = (json.loads(line) for line in done.stdout.splitlines()[-3:])
    for outcome in (small, larger):
        assert f"cannot write the checkpoint {tmp_path / 'checkpoint'}" in outcome["error"]
        assert not outcome["left"]
    assert enough["error"] is None


def test_a_failed_save_leaves_the_earlier_checkpoint_as_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(model, tmp_path / "w")
    trainer.save(tmp_path / "checkpoint")
    before = {p: p.read_bytes() for p in (tmp_path / "checkpoint").rglob("*") if p.is_file()}
    trainer.step(make_batch())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        trainer.save(tmp_path / "checkpoint")
    assert {p: p.read_bytes() for p in (tmp_path / "checkpoint").rglob("*") if p.is_file()} == before


def test_loading_what_is_no_checkpoint_says_so(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w")
    with pytest.raises(UserError, match=r"is no checkpoint: trainer\.safetensors is missing"):
        trainer.load(tmp_path)


def test_loading_another_model_s_checkpoint_says_so(model: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", family="llama", hidden_size=16)
    make_trainer(other, tmp_path / "a").save(tmp_path / "checkpoint")
    with pytest.raises(UserError, match="belongs to another model"):
        make_trainer(model, tmp_path / "b").load(tmp_path / "checkpoint")


@pytest.mark.parametrize("content", [b"", b"\xff" * 999, b"\x02\0\0\0\0\0\0\0{}", "half", "a directory"])
def test_loading_a_broken_checkpoint_is_one_line_naming_the_file(
    model: Path, tmp_path: Path, content: bytes | str
) -> None:
    trainer = make_trainer(model, tmp_path / "w")
    trainer.save(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / checkpoint.STATE
    whole = file.read_bytes()
    file.unlink()
    if content == "a directory":
        file.mkdir()
    else:
        file.write_bytes(content if isinstance(content, bytes) else whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"broken or cut off|names no version") as caught:
        trainer.load(tmp_path / "checkpoint")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
