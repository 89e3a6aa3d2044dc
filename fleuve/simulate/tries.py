"""What becomes of groups and prompts, as the world sees it: which were given up, after how many tries, and why.

It follows the records that the controller writes, by rules of its own, and complains of what does not follow them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fleuve.control.journal import Admitted, Dropped, Ready, Record
from fleuve.simulate.faults import MAX_FAILURES

FAILURES = frozenset({"timeout", "rollout failed", "no verdict", "truncated"})
"""Why a group is dropped that failed: its prompt is tried once more, and once only."""


class ViolationError(AssertionError):
    """The controller broke a promise."""


class Tries:
    """Of one run, across its lives."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}
        """Prompts that failed since a group last came through, in this life."""
        self.without_signal = 0
        """Groups in a row that dynamic sampling replaced, across lives."""
        self._prompts: dict[int, str] = {}
        self._attempts: Counter[str] = Counter()

    def next_life(self, records: Iterable[Record] = ()) -> Tries:
        """As they are for a life that begins here, or where these `records` lead from here."""
        tries = Tries()
        tries.without_signal = self.without_signal
        tries._prompts, tries._attempts = dict(self._prompts), Counter(self._attempts)
        for record in records:
            tries.apply(record)
        tries.failed = {}
        return tries

    def apply(self, record: Record) -> None:
        """It was written down.

        Raises:
            ViolationError: a prompt was tried too often or too seldom, or too many of them have failed.
        """
        match record:
            case Admitted(group=group, prompt=prompt):
                self._prompts[group] = prompt.id
            case Ready(group=group):
                self.without_signal = 0
                self._came_through(group)
            case Dropped(group=group, reason="no signal", again=again):
                self.without_signal += 1
                self._came_through(group)
                self._check_again(group, again, expected=False)
            case Dropped(group=group, reason="overdue", again=again):
                self._check_again(group, again, expected=True)
            case Dropped(group=group, again=again):
                self._failed(group, again)
            case _:
                pass

    def _came_through(self, group: int) -> None:
        self.failed = {}
        self._attempts.pop(self._prompts[group], None)

    def _failed(self, group: int, again: bool) -> None:
        prompt = self._prompts[group]
        self.failed[prompt] = None
        if len(self.failed) >= MAX_FAILURES:
            raise ViolationError(f"{len(self.failed)} prompts in a row have failed, and the run goes on")
        self._attempts[prompt] += 1
        self._check_again(group, again, expected=self._attempts[prompt] == 1)
        if self._attempts[prompt] > 1:
            del self._attempts[prompt]

    def _check_again(self, group: int, again: bool, expected: bool) -> None:
        prompt = self._prompts[group]
        if again and not expected:
            raise ViolationError(
                f"prompt {prompt} of group {group} is tried again after {self._attempts[prompt]} tries"
            )
        if expected and not again:
            raise ViolationError(f"prompt {prompt} of group {group} is given up at the first failure")
