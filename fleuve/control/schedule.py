"""The deadlines of the groups alive, kept so that the next batch is found at once however many groups there are.

`batching.next_batch` is the definition of what is found; here groups are kept by deadline. Deadlines take few distinct
values (at most η + 2 of them), so whether a step must wait is a matter of counting: O(η) at each question, and of the
groups only those are looked at that make up a batch. A pure state machine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from itertools import chain


class Schedule:
    """Groups by deadline: those that are running, and those that are ready."""

    def __init__(self) -> None:
        self._running: Counter[int] = Counter()  # deadline → groups
        self._ready: dict[int, list[int]] = {}  # deadline → groups, sorted: in order of admission
        self._ready_count = 0

    def run(self, deadline: int) -> None:
        """A group of that deadline runs."""
        self._running[deadline] += 1

    def end_run(self, deadline: int) -> None:
        """A group of that deadline runs no more."""
        self._running[deadline] -= 1
        if not self._running[deadline]:
            del self._running[deadline]

    def add_ready(self, group: int, deadline: int) -> None:
        """`group` waits to be trained."""
        insort(self._ready.setdefault(deadline, []), group)
        self._ready_count += 1

    def remove_ready(self, group: int, deadline: int) -> None:
        """`group` waits no more.

        Raises:
            KeyError: it does not wait under that deadline.
        """
        groups = self._ready[deadline]
        at = bisect_left(groups, group)
        if at == len(groups) or groups[at] != group:
            raise KeyError(group)
        del groups[at]
        self._ready_count -= 1
        if not groups:
            del self._ready[deadline]

    def next_batch(self, version: int, batch_size: int, *, wait: bool) -> list[int] | None:
        """What `batching.next_batch` says of these groups."""
        if self._ready_count < batch_size or (wait and not self._can_step(version, batch_size)):
            return None
        batch: list[int] = []
        for deadline in sorted(self._ready):
            batch += self._ready[deadline][: batch_size - len(batch)]
            if len(batch) == batch_size:
                break
        return batch

    def any_overdue(self, version: int) -> bool:
        """Whether a group was to be trained by a step from before `version`."""
        return any(deadline < version for deadline in chain(self._running, self._ready))

    def _can_step(self, version: int, batch_size: int) -> bool:
        """Whether the groups that a step from `version` leaves over fit into the steps after it (`batching.feasible`):
        of each deadline, ready or running, and with the `batch_size` most urgent ready ones taken out."""
        to_take, left = batch_size, 0
        for deadline in sorted({*self._running, *self._ready}):
            ready = len(self._ready.get(deadline, ()))
            taken = min(ready, to_take)
            to_take -= taken
            left += ready - taken + self._running[deadline]
            if left > max(0, deadline - version) * batch_size:
                return False
        return True
