"""Whole runs whose weights are broadcast: every version arrives so; where a worker dies or hangs the run goes on, and
versions are true."""

from __future__ import annotations

import signal

import pytest
from rescored import rescored
from runs import family, train
from test_worker_death import assert_whole, output, running, steps, wait_for, worker

BROADCAST = ["--weights.transport", "broadcast", "--rollout.workers", "2"]
KEPT = ["--checkpoint.every", "1", "--checkpoint.keep", "99"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "flags",
    [[], ["--trainer.ranks", "2"], ["--launch.placement", "colocated", "--control.max_staleness", "0"]],
    ids=["disaggregated", "two ranks", "colocated"],
)
def test_every_version_comes_to_every_worker_by_broadcast_and_versions_are_true(tmp_path, flags):
    run = train(tmp_path, *BROADCAST, *KEPT, *flags, "--weights.broadcast_timeout", "60")
    assert run.code == 0, run.output
    assert len(run.metrics) == 5
    assert (run.metrics[-1]["weights/broadcast"], run.metrics[-1]["weights/missed"]) == (10, 0)
    worst, mixed = rescored(run)
    assert worst < 1e-4
    assert mixed > 0 or "colocated" in flags


def test_a_trainer_that_is_killed_comes_back_and_broadcasts_again(tmp_path):
    with running(tmp_path, *BROADCAST, *KEPT) as process:
        (trainer,) = [p for p in family(process)[1:] if "fleuve.train" in p.cmdline()]
        trainer.kill()
        wait_for(tmp_path, lambda: "the trainer is back at version" in output(tmp_path), 180)
        before = steps(tmp_path)
        process.wait(240)
    run = assert_whole(tmp_path, process)
    assert rescored(run)[0] < 1e-4
    assert run.metrics[-1]["weights/broadcast"] >= 2 * (8 - before)
    assert run.metrics[-1]["trainer/restarts"] == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_ends_costs_no_more_than_itself(tmp_path, number):
    flags = [*BROADCAST, *KEPT, "--rollout.health_timeout", "8", "--rollout.update_timeout", "60"]
    with running(tmp_path, *flags) as process:
        worker(process, "worker-1").send_signal(number)
        wait_for(tmp_path, lambda: "worker-1 is given up" in output(tmp_path))
        wait_for(tmp_path, lambda: "worker-1 serves" in output(tmp_path) or steps(tmp_path) >= 8, 180)
        process.wait(240)
    run = assert_whole(tmp_path, process)
    assert rescored(run)[0] < 1e-4
    assert run.metrics[-1]["weights/broadcast"] >= 8
