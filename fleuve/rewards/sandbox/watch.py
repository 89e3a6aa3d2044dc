"""What a sandbox uses, seen from outside: memory, processes, CPU time, and the time in which it waited for a core."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from fleuve.rewards.sandbox.inside import children

_PAGE, _CLOCK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Of all processes below a sandbox's first: bytes of memory held and how many there are, now; and, since the watch
    began, seconds of CPU time, and seconds in which one of them would have run and got no core."""

    memory: int
    processes: int
    ran: float
    waited: float


class Watch:
    """The programs of one sandbox, looked at again and again. What lives only between two looks is not seen.

    A program is held up for as long as its most delayed thread: of each interval between two looks the longest wait of
    any of its threads counts, and no more than the interval. So threads that keep each other waiting gain little by
    it: while one of them waits for another, that one uses up the CPU time of all."""

    def __init__(self, first: int, now: float) -> None:
        """`first`: the process id of the sandbox's first process; `now` as of `time.monotonic`."""
        self._first = first
        self._looked = now
        self._ran: dict[int, float] = {}
        self._delays: dict[int, float] = {}
        self._total_ran = self._total_waited = 0.0

    def look(self, now: float) -> Usage:
        """Take in what has changed since the last look."""
        memory, ran, delays = 0, dict[int, float](), dict[int, float]()
        todo, seen = children(self._first), set[int]()
        while todo:
            pid = todo.pop()
            if pid not in seen:
                seen.add(pid)
                todo.extend(children(pid))
                memory += _memory(pid)
                ran[pid] = _ran(pid)
                delays |= _delays(pid)
        self._total_ran += sum(_grown(seconds, self._ran.get(pid, 0.0)) for pid, seconds in ran.items())
        longest = max((_grown(seconds, self._delays.get(tid, 0.0)) for tid, seconds in delays.items()), default=0.0)
        self._total_waited += min(longest, now - self._looked)
        self._looked, self._ran, self._delays = now, ran, delays
        return Usage(memory, len(seen), self._total_ran, self._total_waited)


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now  # less: another has got its number


def _memory(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def _ran(pid: int) -> float:
    """Seconds of CPU time of all its threads."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat") as file:
        times = file.read().rpartition(")")[2].split()
        return (int(times[11]) + int(times[12])) / _CLOCK
    return 0.0


def _delays(pid: int) -> dict[int, float]:
    """Seconds that each of its threads has waited for a core, while it could have run."""
    found: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                    found[int(thread)] = int(file.read().split()[1]) / 1e9
    return found
