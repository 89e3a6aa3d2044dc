"""How much of the machine one program may use."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
from typing import Any

_BASE = 192 * 2**20
"""Bytes of address space that the interpreter itself takes."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of a sandbox: `memory` of all its processes together, `scratch` that their files take, in at most `files` files;
    `processes` counts threads too. Of a program: `seconds` on the clock, `cpu_seconds`, `output` to stdout and stderr.
    Of a process: `open_files`, and again `memory`, here of address space. Sizes are in bytes."""

    seconds: float = 4.0
    cpu_seconds: float = 2.0
    memory: int = 512 * 2**20
    processes: int = 8
    output: int = 2**20
    scratch: int = 16 * 2**20
    files: int = 256
    open_files: int = 64

    def encoded(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def apply(limits: Limits, others: int) -> None:
    """Limit this process and what it forks. `others` are the processes of the same user (in the same user namespace)
    that are not the program's."""
    set_limit(resource.RLIMIT_CPU, math.ceil(limits.cpu_seconds))
    set_limit(resource.RLIMIT_AS, limits.memory + _BASE)
    set_limit(resource.RLIMIT_NPROC, limits.processes + others)
    set_limit(resource.RLIMIT_FSIZE, limits.scratch)
    set_limit(resource.RLIMIT_NOFILE, limits.open_files)
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_MEMLOCK, 0)
    set_limit(resource.RLIMIT_MSGQUEUE, 0)
    set_limit(resource.RLIMIT_STACK, 8 * 2**20, hard=64 * 2**20)


def set_limit(which: int, value: int, hard: int | None = None) -> None:
    """Lower a limit. The hard one too, so that the program cannot raise it again."""
    highest = resource.getrlimit(which)[1]
    bounds = [value, value if hard is None else hard]
    if highest != resource.RLIM_INFINITY:
        bounds = [min(bound, highest) for bound in bounds]
    resource.setrlimit(which, (bounds[0], bounds[1]))


def lift_cpu_limit() -> None:
    """The fork server lives longer than the check that started it."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
