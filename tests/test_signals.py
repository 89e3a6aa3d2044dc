"""Signals to `fleuve train` before there is a run that could answer them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleuve.launch.stop import Stop
from fleuve.observe.rundir import run_directory_problem

CONFIG = """
run_dir = "{run}"
steps = 1
[model]
path = "builtin:small"
[data]
train = "procedural:chain"
"""

PLACES = [
    "typer",
    "fleuve.config.loader",
    "fleuve.config.preflight",
    "fleuve.launch.train",
    "fleuve.control.controller",
    "asyncio.runners",
]
"""Modules in the order in which the command comes to load them."""

COMMAND = """
import importlib.abc, json, os, runpy, sys

class Sender(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        for number in sent.pop(name, []):
            os.kill(os.getpid(), number)
        return None

sent, sys.argv = json.loads(sys.argv[1]), ["fleuve", "train", sys.argv[2]]
sys.meta_path.insert(0, Sender())
runpy.run_module("fleuve", run_name="__main__", alter_sys=True)
"""


def train(tmp_path: Path, sent: dict[str, list[int]], *, made: bool = False) -> subprocess.CompletedProcess[str]:
    """`fleuve train` of a run that has all its steps if it is `made`; it gets the signals when it loads the modules."""
    run = tmp_path / "run"
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(run=run))
    if made:
        (run / "checkpoints" / "step-000001").mkdir(parents=True)
        (run / "checkpoints" / "step-000001" / "COMMITTED").write_text('{"version": 1, "files": {}}')
        (run / "config.toml").write_text(config.read_text())
    words = [sys.executable, "-c", COMMAND, json.dumps(sent), str(config)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[1]
    )


@pytest.mark.parametrize(
    ("number", "place"),
    [
        (signal.SIGINT, "typer"),
        (signal.SIGTERM, "fleuve.config.loader"),
        (signal.SIGHUP, "fleuve.launch.train"),
        (signal.SIGINT, "fleuve.control.controller"),
    ],
    ids=str,
)
def test_told_to_end_before_there_is_a_run_it_ends_without_a_word_and_leaves_nothing(
    tmp_path: Path, number: int, place: str
) -> None:
    done = train(tmp_path, {place: [number]})
    assert (done.returncode, done.stdout) == (130, "")
    assert [line for line in done.stderr.splitlines() if not line.startswith("note: ")] == []
    assert run_directory_problem(tmp_path / "run") is None
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_checkpoint_asked_for_at_any_time_does_not_end_it(tmp_path: Path) -> None:
    done = train(tmp_path, {place: [signal.SIGUSR1] for place in PLACES}, made=True)
    assert done.returncode == 0, done.stderr
    assert "has made its 1 steps" in done.stdout


def test_a_checkpoint_asked_for_before_there_can_be_one_is_made_once_there_can() -> None:
    class Controller:
        asked = 0

        def save_soon(self) -> None:
            self.asked += 1

    async def course() -> int:
        main = asyncio.current_task()
        assert main is not None
        stop, controller = Stop(main), Controller()  # type: ignore[arg-type]
        stop.save()
        stop.save()
        stop.controls(controller, None, list)  # type: ignore[arg-type]
        return controller.asked

    assert asyncio.run(course()) == 1
