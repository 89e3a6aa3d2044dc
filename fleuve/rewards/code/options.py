"""How a verifier process checks programs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fleuve.rewards.sandbox.limits import Limits

_MB = 2**20


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

    def limits(self, row: dict[str, Any]) -> Limits:
        """For one row's programs: `time_limit` (seconds of CPU time) and `memory_limit` (MB) in a row replace the
        settings' own, but cannot exceed the deadline.

        Raises:
            ValueError: they are no positive numbers.
        """
        cpu, memory = row.get("time_limit", self.cpu_seconds), row.get("memory_limit", self.memory_mb)
        for field, value in (("time_limit", cpu), ("memory_limit", memory)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                raise ValueError(f'the row\'s "{field}" must be a positive number, not {value!r}')
        return Limits(
            seconds=max(self.seconds, 2.0 * cpu) if "time_limit" in row else self.seconds,
            cpu_seconds=float(cpu),
            memory=int(memory * _MB),
            processes=self.processes,
            output=self.output_kb * 1024,
            scratch=self.scratch_mb * _MB,
        )
