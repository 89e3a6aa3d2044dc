"""The time of one check: how much of it is its programs', and when it ends in any case."""

from __future__ import annotations

import time
from collections.abc import Callable

from fleuve.rewards.sandbox.run import SandboxError

_LEAD = 0.1
"""Of the deadline: so much before a promise runs out, it is renewed."""


class OverBudgetError(RuntimeError):
    """The programs of a check need more time together than it has, though none of them more than its own limits."""


class Clock:
    """Runs from when it is made. Time that is not the programs' (they waited for a core, a sandbox was opened) is made
    up for: who waits for the check is told, by `promise`, to wait longer. So it is for the last program that begins
    within the budget, which may go on to its own limit: a hanging one is wrong whenever it began. There is an end to
    that: `end`, a time of `time.monotonic`."""

    def __init__(self, deadline: float, budget: float, longest: float, promise: Callable[[float], None]) -> None:
        """`promise(seconds)` says that the check ends within so many seconds of its beginning; the first promise, of
        `deadline` seconds, has been given already. `budget` and `longest`: for the programs, and for all of it."""
        self.started = time.monotonic()
        self.end = self.started + longest
        self._deadline, self._budget = deadline, budget
        self._spent = 0.0
        self._promised = deadline
        self._promise = promise

    def restart(self) -> None:
        """Another attempt: what the programs took in the first counts no more."""
        self._spent = 0.0

    def add(self, seconds: float) -> None:
        """A program has ended, which took so long."""
        self._spent += seconds

    def check(self, now: float, taken: float | None = None) -> None:
        """Whether the check may go on. `taken`: the seconds that the program has taken that runs now; None between two
        programs.

        Raises:
            SandboxError: it is at its end. That is never the programs' doing: they have their budget.
            OverBudgetError: they have taken all that they may, and none runs.
        """
        elapsed, spent = now - self.started, self._spent + (taken or 0.0)
        if now >= self.end:
            raise SandboxError(f"for {elapsed - spent:.1f} of {elapsed:.1f} s no core was free for its programs")
        if taken is None and spent >= self._budget:
            raise OverBudgetError(
                f"its tests take more than {self._budget:.3g} s together, which is what reward.deadline = "
                f"{self._deadline:g} s leaves them"
            )
        excused = elapsed - spent
        needed = excused + max(self._budget, spent)
        if needed > self._promised - _LEAD * self._deadline:
            self._promised = needed + self._deadline
            self._promise(self._promised)
