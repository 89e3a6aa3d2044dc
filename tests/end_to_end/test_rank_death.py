"""A run whose trainer has two ranks: kill -9 of either is the loss of the trainer, which comes back; another number of
ranks goes on from its checkpoint."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from runs import Run, command, environment, family, survivors, write_config

STEPS = 8
PATIENCE = 600.0
"""Seconds: five processes share a small machine."""


def _ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Rank by rank."""
    found = [p for p in family(process)[1:] if "fleuve.train" in p.cmdline()]
    return sorted(found, key=lambda p: int('"rank": 1' in p.cmdline()[-1]))


def _wait_for(condition, output: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "tensor"), [(1, 1), (0, 2)])
def test_a_killed_rank_costs_no_step_and_one_rank_goes_on_where_two_ended(
    tmp_path: Path, victim: int, tensor: int
) -> None:
    """Whether each computes micro-batches of its own, or both compute layers together."""
    config, output = write_config(tmp_path), tmp_path / "output.txt"
    metrics = tmp_path / "run" / "metrics.jsonl"
    flags = ["--steps", str(STEPS), "--trainer.ranks", "2", "--trainer.device", "cpu", "--observe.live", "off"]
    flags += ["--trainer.tensor_parallel", str(tensor)]
    with output.open("w") as file:
        process = subprocess.Popen(
            command(config, *flags), cwd=tmp_path, env=environment(), stdout=file, stderr=subprocess.STDOUT, text=True
        )
    try:
        _wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, output)
        processes = family(process)
        ranks = _ranks(process)
        assert len(ranks) == 2
        ranks[victim].send_signal(signal.SIGKILL)
        _wait_for(lambda: "the trainer is back at version" in output.read_text() or process.poll() is not None, output)
        process.wait(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    said = output.read_text()
    assert process.returncode == 0, said
    assert "the trainer is lost: trainer" in said
    assert "killed by SIGKILL" in said
    run = Run(0, said, tmp_path / "run")
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    groups = [group["group"] for _, group, _ in run.answers]
    assert len(groups) == len(set(groups)) * 4 == STEPS * 4 * 4
    assert run.metrics[-1]["trainer/restarts"] == 1
    assert max(row["mismatch/logprob_abs_mean"] for row in run.metrics if "mismatch/logprob_abs_mean" in row) < 1e-4
    assert survivors(processes, within=5) == []
    assert (run.checkpoints[-1] / "trainer-00002-of-00002.safetensors").exists()
    assert {p.name for p in (tmp_path / "run" / "logs").glob("trainer*")} == {"trainer.log", "trainer-1.log"}

    on = [*flags, "--steps", str(STEPS + 2), "--trainer.ranks", "1", "--trainer.tensor_parallel", "1"]
    done = subprocess.run(
        command(config, *on), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 3))
    assert (run.checkpoints[-1] / "trainer.safetensors").exists()
