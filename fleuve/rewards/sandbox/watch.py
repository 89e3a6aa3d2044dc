"""What a sandbox uses, seen from outside: memory, processes, and the time in which it would have run but could not."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from fleuve.rewards.sandbox.inside import children

_PAGE, _CLOCK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Of all processes below the first: bytes of memory held, how many there are, seconds that they have run, and
    seconds that their first threads would have run but got no core. What has ended is not counted."""

    memory: int
    processes: int
    ran: float
    waited: float


def usage(first: int) -> Usage:
    """Look at the processes below a sandbox's first one."""
    memory = processes = 0
    ran = waited = 0.0
    seen: set[int] = set()
    todo = children(first)
    while todo:
        pid = todo.pop()
        if pid in seen:
            continue
        seen.add(pid)
        processes += 1
        todo.extend(children(pid))
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{pid}/statm") as file:
                fields = file.read().split()
            memory += int(fields[1]) * _PAGE
            with open(f"/proc/{pid}/stat") as file:
                times = file.read().rpartition(")")[2].split()
            ran += (int(times[11]) + int(times[12])) / _CLOCK
            with open(f"/proc/{pid}/schedstat") as file:
                waited += int(file.read().split()[1]) / 1e9
    return Usage(memory, processes, ran, waited)
