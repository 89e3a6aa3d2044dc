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
    has not ended is not in the second: the kernel adds it when the thread gets its core. And what it asks of the
    machine: no wait of one that has made itself `humble` is made up for."""

    ran: float
    waited: float
    runnable: bool
    humble: bool = False


class Watch:
    """The programs of one sandbox, looked at again and again.

    Of what lives only between two looks, memory is not seen, but CPU time is: the kernel adds it to that of who waited
    for its end, in the last resort the sandbox's first process.

    A program is held up for as long as its most delayed thread: of each interval between two looks the longest wait of
    any of its threads counts, and no more than the interval. So threads that keep each other waiting gain little by
    it: while one of them waits for another, that one uses up the CPU time of all. A thread with a lower priority,
    another policy or fewer cores than this process's own has itself to thank for its waiting. (The filter of system
    calls lets none do that. Where there is none, it is seen here.)"""

    def __init__(self, first: int, now: float) -> None:
        """`first`: the process id of the sandbox's first process; `now` as of `time.monotonic`."""
        self._first = first
        self._looked = now
        self._before = _times(first).of_children
        self._threads: dict[int, _Thread] = {}
        self._total_ran = self._total_waited = 0.0

    def look(self, now: float) -> Usage:
        """Take in what has changed since the last look."""
        memory, threads = 0, dict[int, _Thread]()
        # Parents before their children: of a process that ends in the meantime nothing is counted twice.
        ran = _times(self._first).of_children - self._before
        todo, seen, own = children(self._first), set[int](), _rank(os.getpid(), _stat("/proc/self"))
        while todo:
            pid = todo.pop()
            if pid not in seen:
                seen.add(pid)
                times = _times(pid)
                ran += times.own + times.of_children
                todo.extend(children(pid))
                memory += _memory(pid)
                threads |= _threads(pid, own)
        interval = now - self._looked
        self._total_ran = max(self._total_ran, ran)  # less: one changed its parent between two of these lines
        waits = [_wait(thread, self._threads.get(tid), interval) for tid, thread in threads.items()]
        self._total_waited += min(max(waits, default=0.0), interval)
        self._looked, self._threads = now, threads
        return Usage(memory, len(seen), self._total_ran, self._total_waited)


def _wait(thread: _Thread, before: _Thread | None, interval: float) -> float:
    """What a thread waited since the last look: what the kernel has counted, or, of one that could run at both looks,
    the time in which it did not."""
    if thread.humble:
        return 0.0
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


class _Times(NamedTuple):
    """Seconds of CPU time: of all threads of a process, and of those of its descendants whose end was waited for."""

    own: float
    of_children: float


def _times(pid: int) -> _Times:
    with contextlib.suppress(OSError, IndexError, ValueError):
        user, system, children_user, children_system = map(int, _stat(f"/proc/{pid}")[11:15])
        return _Times((user + system) / _CLOCK, (children_user + children_system) / _CLOCK)
    return _Times(0.0, 0.0)


def _threads(pid: int, own: _Rank) -> dict[int, _Thread]:
    found: dict[int, _Thread] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = _stat(f"/proc/{pid}/task/{thread}")
                with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                    ran, waited = map(int, file.read().split()[:2])
                humble = _rank(int(thread), stat).humbler(own)
                found[int(thread)] = _Thread(ran / 1e9, waited / 1e9, stat[0] == "R", humble)
    return found


class _Rank(NamedTuple):
    """A thread among those who want a core: its niceness, that of its session's group, its policy, and its cores."""

    nice: int
    group_nice: int
    policy: int
    cores: frozenset[int]

    def humbler(self, other: _Rank) -> bool:
        """Whether it has less than `other`, or asks for another policy."""
        lower = self.nice > other.nice or self.group_nice > other.group_nice
        return lower or self.policy != other.policy or not self.cores >= other.cores


def _rank(thread: int, stat: list[str]) -> _Rank:
    group_nice = 0
    # There only with a kernel that makes such groups. Who sees /proc can write his own there.
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{thread}/autogroup") as file:
        group_nice = int(file.read().split()[2])
    return _Rank(int(stat[16]), group_nice, int(stat[38]), frozenset(os.sched_getaffinity(thread)))


def _stat(folder: str) -> list[str]:
    """The fields of proc(5)'s `stat` from the third on: the state."""
    with open(f"{folder}/stat") as file:
        return file.read().rpartition(")")[2].split()
