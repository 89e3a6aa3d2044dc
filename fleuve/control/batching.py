"""Which ready groups make the next batch: earliest deadline first, and never at the price of a deadline.

A group's deadline is the last version from which a step may start that trains it within η. Taking the ready groups
with the earliest deadlines is optimal, but groups still running have deadlines too: before a batch is taken, those left
over must still fit into the steps that come. If they do not, the step waits for a running group to finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def earliest_deadlines(ready: Mapping[int, int], batch_size: int) -> list[int] | None:
    """The `batch_size` ready groups with the earliest deadlines (`ready`: group → deadline); None if there are fewer.

    Ties go to the group admitted first, so that no group waits for ever.
    """
    if len(ready) < batch_size:
        return None
    return sorted(ready, key=lambda group: (ready[group], group))[:batch_size]


def feasible(deadlines: Mapping[int, int], version: int, batch_size: int) -> bool:
    """Whether steps of `batch_size` groups, the next starting from `version`, can train each group by its deadline.

    Example: with 2 groups a step, 3 groups of deadline 5 fit into the steps from versions 4 and 5, not into the one
    from 5.
    """
    due = Counter(deadlines.values())
    total = 0
    for deadline in sorted(due):
        total += due[deadline]
        if total > max(0, deadline - version + 1) * batch_size:
            return False
    return True


def next_batch(
    ready: Mapping[int, int], running: Mapping[int, int], version: int, batch_size: int, *, wait: bool
) -> list[int] | None:
    """The groups of the step that starts from `version`, or None if it must wait.

    Args:
        ready, running: group → deadline.
        wait: hold the step back while taking it would make a running group miss its deadline (`overdue = wait`).
    """
    batch = earliest_deadlines(ready, batch_size)
    if batch is None or not wait:
        return batch
    taken = set(batch)
    left = {group: deadline for group, deadline in {**ready, **running}.items() if group not in taken}
    return batch if feasible(left, version + 1, batch_size) else None


def surplus(deadlines: Mapping[int, int], version: int, batch_size: int) -> set[int]:
    """The groups (`deadlines`: group → deadline) that cannot all be trained by their deadlines, whatever the order of
    the steps from `version` on: without them the others can. Of equal deadlines, those admitted last."""
    left_out: set[int] = set()
    taken = 0
    for group in sorted(deadlines, key=lambda g: (deadlines[g], g)):
        if taken < (deadlines[group] - version + 1) * batch_size:
            taken += 1
        else:
            left_out.add(group)
    return left_out
