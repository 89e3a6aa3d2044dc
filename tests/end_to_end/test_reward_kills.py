"""Kill -9 on reward workers and their nursery in the middle of a run: nothing lost, nothing scored 0 for it."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import runs

STEPS = 16


def reward_processes(process: subprocess.Popen[str]) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """The nurseries, and the workers that they forked, which share their command line."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "fleuve.rewards.forkserver" in child.cmdline():
                found.append(child)
    pids = {each.pid for each in found}
    workers = [each for each in found if each.ppid() in pids]
    return [each for each in found if each not in workers], workers


@pytest.mark.slow
def test_killed_reward_processes_cost_a_run_nothing(tmp_path: Path) -> None:
    flags = ("--steps", str(STEPS), "--reward.workers", "2", "--observe.live", "off")
    process = runs.launch(tmp_path, *flags)
    draw, kills, deadline = random.Random(0), 0, time.monotonic() + 240
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline
            metrics = tmp_path / "run" / "metrics.jsonl"
            under_way = metrics.exists() and metrics.stat().st_size > 0
            with contextlib.suppress(psutil.Error):
                nurseries, workers = reward_processes(process) if under_way else ([], [])
                # Workers first: where a process starts slowly, one nursery after another dies before it has any, and
                # the workers of the first, which are nobody's children then, see the run to its end.
                if found := workers if kills < 2 else nurseries + workers:
                    draw.choice(found).kill()
                    kills += 1
            time.sleep(draw.uniform(0.05, 0.3))
        output = process.communicate()[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    run = runs.Run(process.returncode, output, tmp_path / "run")
    assert kills >= 3
    assert run.metrics[-1]["step"] == STEPS
    assert run.metrics[-1]["reward_service/replaced"] >= 1
    assert run.metrics[-1]["reward_service/checks"] >= STEPS * 16
    for _, group, answer in run.answers:
        # A verdict is the true one, or there is none: by the arithmetic of the task itself.
        if answer["reward"] is None:
            assert "crashed its process 2 times" in answer["excluded"]
        else:
            assert answer["reward"] == true_reward(group, answer), json.dumps(answer)


def true_reward(group: dict[str, object], answer: dict[str, object]) -> float:
    from fleuve.rewards.math import verify_math

    return verify_math(str(answer["text"]), str(group["answer"]))
