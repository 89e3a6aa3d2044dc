"""How a verifier process checks programs."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from fleuve.rewards.sandbox.limits import Limits

_MB = 2**20
_SHARE = 0.85
"""Of the pool's deadline, for the programs themselves: the rest is for the forks around them."""

PATIENCE = 10.0
"""Times the deadline: so long a check may last at most, where its programs wait for a core."""


def deadline_for(cpu_seconds: float) -> float:
    """The pool's deadline that a row with this `time_limit` needs, rounded up to tenths."""
    return math.ceil(10 * cpu_seconds / _SHARE) / 10


class CodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `[reward.code]`, and the pool's `deadline` in seconds."""

    sandbox: Literal["auto", "namespaces", "limits"] = "auto"
    allow_weak_sandbox: bool = False
    score: Literal["all", "fraction"] = "all"
    seconds: float = 4.0
    cpu_seconds: float = 2.0
    memory_mb: int = 512
    processes: int = 8
    output_kb: int = 1024
    scratch_mb: int = 16
    deadline: float = 5.0

    @property
    def budget(self) -> float:
        """Seconds for all programs of a check together, on the clock, less those in which they waited for a core."""
        return _SHARE * self.deadline

    @property
    def longest(self) -> float:
        """Seconds for a check with everything: programs, sandboxes, and waiting for a core."""
        return PATIENCE * self.deadline

    def limits(self, row: dict[str, Any]) -> Limits:
        """For one row's programs: `time_limit` (seconds of CPU time) and `memory_limit` (MB) in a row replace the
        settings' own. No program's time is more than the budget, so that whatever is over its time is so in time.

        Raises:
            ValueError: they are no positive numbers, or the time is more than the budget.
        """
        cpu, memory = row.get("time_limit", self.cpu_seconds), row.get("memory_limit", self.memory_mb)
        for field, value in (("time_limit", cpu), ("memory_limit", memory)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                raise ValueError(f'the row\'s "{field}" must be a positive number, not {value!r}')
        if "time_limit" in row and cpu > self.budget:
            needed = f"reward.deadline = {deadline_for(cpu):g} or more, not {self.deadline:g}"
            raise ValueError(f'the row\'s "time_limit" = {cpu:g} s needs {needed}')
        seconds = max(self.seconds, 2.0 * cpu) if "time_limit" in row else self.seconds
        return Limits(
            seconds=min(seconds, self.budget),
            cpu_seconds=min(float(cpu), self.budget),
            memory=int(memory * _MB),
            processes=self.processes,
            output=self.output_kb * 1024,
            scratch=self.scratch_mb * _MB,
        )
