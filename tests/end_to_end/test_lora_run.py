"""Whole runs in which adapters learn: versions are true, updates are small, and what is killed comes back the same."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from rescored import rescored
from runs import Run, launch, train, until_step
from safetensors.torch import load_file

from fleuve.config.models import resolve_model

LORA = ["--lora.rank", "4", "--trainer.learning_rate", "2e-2"]
SYNCHRONOUS = [*LORA, "--control.max_staleness", "0", "--steps", "4", "--rollout.max_new_tokens", "64"]


def note_sizes(directory: Path, sizes: dict[str, int]) -> None:
    """Of the weights that are published in `directory` now."""
    for path in directory.glob("*/*.safetensors"):
        with suppress(FileNotFoundError):
            sizes[path.name] = path.stat().st_size


def process_of(run: subprocess.Popen[str], module: str) -> psutil.Process:
    (found,) = [p for p in psutil.Process(run.pid).children(recursive=True) if module in p.cmdline()]
    return found


@pytest.mark.slow
def test_versions_are_true_and_updates_small_and_a_worker_that_starts_again_has_the_present_version(tmp_path):
    (tmp_path / "published").mkdir()
    kept = ["--checkpoint.every", "1", "--checkpoint.keep", "99"]
    path = ["--weights.transport", "path", "--weights.path", str(tmp_path / "published"), "--weights.keep", "99"]
    process = launch(tmp_path, *LORA, "--steps", "6", *kept, *path)
    sizes: dict[str, int] = {}
    until_step(process, tmp_path, 2, partial(note_sizes, tmp_path / "published", sizes))
    process_of(process, "fleuve.engine").kill()
    output, _ = process.communicate(timeout=240)
    run = Run(process.returncode, output, tmp_path / "run")
    assert run.code == 0, output
    assert "worker-0 is given up" in output
    assert [row["step"] for row in run.metrics] == list(range(1, 7))
    worst, mixed = rescored(run)
    assert mixed > 0
    assert worst < 1e-4
    first = load_file(Path(resolve_model("builtin:small")) / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in first.values())
    assert sizes
    assert max(sizes.values()) < 0.06 * whole
    last = load_file(run.checkpoints[-1] / "model" / "model.safetensors")
    moved = {name for name, tensor in last.items() if not tensor.equal(first[name])}
    assert moved == {name for name in first if name.endswith("_proj.weight")}


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_comes_to_the_same_to_the_last_bit(tmp_path):
    (tmp_path / "a").mkdir()
    whole = train(tmp_path / "a", *SYNCHRONOUS)
    assert whole.code == 0, whole.output
    (tmp_path / "b").mkdir()
    process = launch(tmp_path / "b", *SYNCHRONOUS)
    until_step(process, tmp_path / "b", 1)
    process_of(process, "fleuve.train").kill()  # it is made again from the seed and the journal
    until_step(process, tmp_path / "b", 2)
    process.send_signal(signal.SIGTERM)  # with a checkpoint
    output, _ = process.communicate(timeout=60)
    assert "the trainer is lost" in output
    refused = train(tmp_path / "b", *SYNCHRONOUS, "--lora.alpha", "8")
    assert refused.code == 2
    assert "lora.alpha was 32.0 and is now 8.0: the adapters in the checkpoint would count otherwise" in refused.output
    run = train(tmp_path / "b", *SYNCHRONOUS)
    assert run.code == 0, run.output
    assert "going on with the run" in run.output
    for name in ("trainer.safetensors", "adapter/adapter_model.safetensors", "model/model.safetensors"):
        ours, theirs = (r.directory / "checkpoints" / "step-000004" / name for r in (run, whole))
        assert ours.read_bytes() == theirs.read_bytes(), name
