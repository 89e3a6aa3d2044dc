"""Starts real, short training runs of the model that ships with the package, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]

CONFIG = """
run_dir = "{run_dir}"
steps = 5
seed = 1
[model]
path = "builtin:small"
[data]
train = "{data}"
[rollout]
group_size = 4
max_new_tokens = 256
[control]
batch_size = 4
max_staleness = 2
[trainer]
learning_rate = 1e-3
minibatches = 2
"""


@dataclass
class Run:
    """A run that has ended."""

    code: int
    output: str
    directory: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def answers(self) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
        """(version that the step started from, group, answer) of everything trained."""
        out = []
        for path in sorted((self.directory / "rollouts").glob("*.jsonl")):
            start = int(path.stem.split("-")[1]) - 1
            for line in path.read_text().splitlines():
                group = json.loads(line)
                out += [(start, group, answer) for answer in group["trajectories"]]
        return out

    @property
    def checkpoints(self) -> list[Path]:
        return sorted(p.parent for p in (self.directory / "checkpoints").glob("*/COMMITTED"))


def write_config(tmp_path: Path, data: str = "procedural:chain") -> Path:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(run_dir=tmp_path / "run", data=data))
    return config


def command(config: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "fleuve", "train", str(config), *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}


def train(tmp_path: Path, *flags: str, data: str = "procedural:chain", timeout: float = 240) -> Run:
    """Run to the end."""
    done = subprocess.run(
        command(write_config(tmp_path, data), *flags),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Run(done.returncode, done.stdout + done.stderr, tmp_path / "run")


def launch(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    """Start a run in a session of its own."""
    return subprocess.Popen(
        command(write_config(tmp_path), *flags),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until_step(
    process: subprocess.Popen[str], tmp_path: Path, step: int, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Wait until the run has reported `step`, and call `meanwhile` again and again."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= step):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate()[0])
        meanwhile()
        time.sleep(0.01)


def start(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    """Start a long run and wait until it has trained two steps."""
    process = launch(tmp_path, "--steps", "10000", *flags)
    until_step(process, tmp_path, 2)
    return process


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The run's processes."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def survivors(processes: list[psutil.Process], within: float) -> list[psutil.Process]:
    """Those of `processes` that still run after `within` seconds."""
    _, alive = psutil.wait_procs([p for p in processes if p.pid != os.getpid()], timeout=within)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
