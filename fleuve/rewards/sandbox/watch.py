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


class _Thread(NamedTuple):
    """Seconds that it had a core, seconds that it waited for one, and whether it has or waits for one now. A wait that
    has not ended is not in the second: the kernel adds it when the thread gets its core."""

    ran: float
    waited: float
    runnable: bool


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
        self._threads: dict[int, _Thread] = {}
        self._total_ran = self._total_waited = 0.0

    def look(self, now: float) -> Usage:
        """Take in what has changed since the last look."""
        memory, ran, threads = 0, dict[int, float](), dict[int, _Thread]()
        todo, seen = children(self._first), set[int]()
        while todo:
            pid = todo.pop()
            if pid not in seen:
                seen.add(pid)
                todo.extend(children(pid))
                memory += _memory(pid)
                ran[pid] = _ran(pid)
                threads |= _threads(pid)
        interval = now - self._looked
        self._total_ran += sum(_grown(seconds, self._ran.get(pid, 0.0)) for pid, seconds in ran.items())
        waits = [_wait(thread, self._threads.get(tid), interval) for tid, thread in threads.items()]
        self._total_waited += min(max(waits, default=0.0), interval)
        self._looked, self._ran, self._threads = now, ran, threads
        return Usage(memory, len(seen), self._total_ran, self._total_waited)


def _wait(thread: _Thread, before: _Thread | None, interval: float) -> float:
    """What a thread waited since the last look: what the kernel has counted, or, of one that could run at both looks,
    the time in which it did not."""
    if before is None:
        return thread.waited
    counted = _grown(thread.waited, before.waited)
    if thread.runnable and before.runnable:
        return max(counted, interval - _grown(thread.ran, before.ran))
    return counted


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


def _threads(pid: int) -> dict[int, _Thread]:
    found: dict[int, _Thread] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{pid}/task/{thread}/stat") as file:
                    runnable = file.read().rpartition(")")[2].split()[0] == "R"
                with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                    ran, waited = map(int, file.read().split()[:2])
                found[int(thread)] = _Thread(ran / 1e9, waited / 1e9, runnable)
    return found
