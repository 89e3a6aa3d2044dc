"""Kill -9 and SIGSTOP of rollout workers in real runs: the run goes on, trains every step, and loses no group."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from runs import Run, command, environment, family, survivors, write_config

SHARED_MEMORY = Path("/dev/shm")
STEPS = 8


@contextmanager
def running(tmp_path: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has trained two steps."""
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command(write_config(tmp_path), "--steps", str(STEPS), "--observe.live", "off", *flags),
            cwd=tmp_path,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            wait_for(tmp_path, lambda: steps(tmp_path) >= 2)
            yield process
        finally:
            process.kill()
            process.wait()


def output(tmp_path: Path) -> str:
    return (tmp_path / "output.txt").read_text()


def steps(tmp_path: Path) -> int:
    metrics = tmp_path / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for(tmp_path: Path, condition, seconds: float = 90.0) -> float:
    """Seconds until `condition()`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, output(tmp_path)
        time.sleep(0.05)
    return time.monotonic() - began


def worker(process: subprocess.Popen[str], name: str) -> psutil.Process:
    """The process that is `name` now."""
    found = [
        p for p in family(process)[1:] if "fleuve.engine" in p.cmdline() and f'"name": "{name}"' in p.cmdline()[-1]
    ]
    (engine,) = found
    return engine


def assert_whole(tmp_path: Path, process: subprocess.Popen[str]) -> Run:
    """The run has ended well: every step trained, every group whole and trained once, nothing left over."""
    said = output(tmp_path)
    assert process.returncode == 0, said
    run = Run(process.returncode, said, tmp_path / "run")
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    groups = [group["group"] for _, group, _ in run.answers]
    assert len(groups) == STEPS * 4 * 4
    assert len(set(groups)) == STEPS * 4
    assert run.metrics[-1].get("groups/dropped", 0) == 0, said
    assert max(row["staleness/max"] for row in run.metrics) <= 2
    assert all(len(a["versions"]) == len(a["output_ids"]) == len(a["logprobs"]) for _, _, a in run.answers)
    assert run.checkpoints
    assert not list(SHARED_MEMORY.glob(f"fleuve-{process.pid}-*"))
    return run


@pytest.mark.slow
def test_one_worker_is_killed_and_one_stopped_and_the_third_goes_on_until_they_are_back(tmp_path):
    with running(tmp_path, "--rollout.workers", "3", "--rollout.health_timeout", "4") as process:
        processes = family(process)
        killed, stopped = worker(process, "worker-1"), worker(process, "worker-2")
        killed.send_signal(signal.SIGKILL)
        stopped.send_signal(signal.SIGSTOP)
        assert wait_for(tmp_path, lambda: "worker-1 is given up" in output(tmp_path)) < 5
        assert wait_for(tmp_path, lambda: "worker-2 is given up" in output(tmp_path)) < 15
        process.wait(timeout=120)
        run = assert_whole(tmp_path, process)
    assert survivors(processes, within=1) == []
    assert run.metrics[-1]["fleet/healthy"] >= 1


@pytest.mark.slow
def test_the_only_worker_dies_and_the_run_waits_for_it_and_goes_on(tmp_path):
    with running(tmp_path) as process:
        processes = family(process)
        victim = worker(process, "worker-0")
        victim.kill()
        process.wait(timeout=120)
        run = assert_whole(tmp_path, process)
    assert "no rollout worker is left: waiting up to 600 s" in run.output
    assert "worker-0 serves, with version" in run.output
    assert survivors([victim, *processes], within=1) == []


@pytest.mark.slow
def test_a_worker_that_never_comes_back_ends_the_run_with_a_checkpoint_and_the_reason(tmp_path):
    with running(tmp_path, "--rollout.no_worker_timeout", "4", "--steps", "10000") as process:
        processes = family(process)
        deadline = time.monotonic() + 60
        while process.poll() is None:
            assert time.monotonic() < deadline, output(tmp_path)
            with suppress(psutil.Error):
                for child in family(process)[1:]:
                    if "fleuve.engine" in child.cmdline():
                        child.kill()
            time.sleep(0.05)
        said = output(tmp_path)
    assert process.returncode == 1, said
    assert "error: no rollout worker for 4 s: worker-0" in said
    assert "Traceback" not in said
    assert list((tmp_path / "run" / "checkpoints").glob("*/COMMITTED"))
    assert survivors(processes, within=5) == []


@pytest.mark.slow
def test_workers_join_and_leave_while_the_run_goes_on(tmp_path):
    run = tmp_path / "run"

    def fleet(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fleuve", "fleet", *words],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with running(tmp_path, "--steps", "10000") as process:
        assert fleet("add", str(run)).startswith("worker-1 is being started")
        wait_for(tmp_path, lambda: "worker-1 serves, with version" in output(tmp_path))
        processes = family(process)
        assert fleet("remove", str(run), "worker-0", "--at-once").startswith("worker-0 leaves now")
        wait_for(tmp_path, lambda: "worker-0 has left" in output(tmp_path))
        before = steps(tmp_path)
        wait_for(tmp_path, lambda: steps(tmp_path) > before + 2)
        assert fleet("show", str(run)).split()[:2] == ["worker-1", "healthy"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert survivors(processes, within=1) == []
