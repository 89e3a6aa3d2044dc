"""The processes of a run by what they are, and those that outlived it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil
from chaos_plan import Kind

MARK = "FLEUVE_CHAOS"
"""In the environment of every process of a run but those in its sandboxes, whose environment is empty."""

_REWARDS = "fleuve.rewards.forkserver"


@dataclass
class Census:
    """Everybody that was ever seen below the controllers of one run."""

    mark: str
    everybody: dict[psutil.Process, Kind | None] = field(default_factory=dict)

    def take(self, controller: int) -> None:
        """Look at the tree below `controller` as it is now."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(controller).children(recursive=True):
                if process not in self.everybody:
                    with contextlib.suppress(psutil.Error):
                        self.everybody[process] = _kind(process, controller)

    def alive(self, kind: Kind) -> list[psutil.Process]:
        """Those of a kind, oldest first."""
        found = [p for p, k in self.everybody.items() if k == kind and _runs(p)]
        return sorted(found, key=lambda p: (p.create_time(), p.pid))

    def survivors(self, within: float) -> list[psutil.Process]:
        """Of the whole run, controllers included: who still runs after `within` seconds. For when it has ended."""
        deadline = time.monotonic() + within
        while True:
            left = [*(p for p in self.everybody if _runs(p)), *_marked(self.mark)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)


def describe(processes: Iterable[psutil.Process]) -> str:
    """A line each."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(f"{process.pid} {process.status()} {' '.join(process.cmdline())[:120]}")
    return "; ".join(lines)


def send(process: psutil.Process, number: int) -> bool:
    """Whether it was still there."""
    try:
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def rank_of(trainer: psutil.Process) -> int:
    """Which of the trainer's ranks it is."""
    with contextlib.suppress(psutil.Error):
        return int(json.loads(trainer.cmdline()[-1]).get("rank", 0))
    return 0


def clear_away(mark: str) -> None:
    """End what is left of a run, be it stopped."""
    for process in _marked(mark):
        send(process, signal.SIGKILL)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _marked(mark: str) -> list[psutil.Process]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted in file.read().split(b"\0") and pid != os.getpid() and _runs(p := psutil.Process(pid)):
                    found.append(p)
    return found


def _kind(process: psutil.Process, controller: int) -> Kind | None:
    words = process.cmdline()
    if "fleuve.engine" in words:
        return "rollout worker"
    if "fleuve.train" in words:
        return "trainer"
    if _REWARDS in words:
        return "nursery" if process.ppid() == controller else "reward worker"
    if any("fleuve.rewards.sandbox.server" in word for word in words):
        parent = process.parent()
        return "sandbox server" if parent is not None and _REWARDS in parent.cmdline() else None
    return None
