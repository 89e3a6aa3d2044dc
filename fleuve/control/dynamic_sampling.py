"""Dynamic sampling: groups that teach nothing are replaced by others, so that every batch is full of signal.

Group-relative advantages are all zero where all answers to a prompt score alike: such a group takes a place in the
batch and adds nothing to the gradient. Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fleuve.contracts import RunError
from fleuve.types import Group

BATCHES, AT_LEAST = 10, 64
"""Batches' worth of groups in a row without signal after which there is no hope that others follow; and the fewest
groups, since ten batches of one group each can come so by chance."""


def compared(group: Group, truncated: Literal["keep", "exclude"]) -> list[float]:
    """The raw rewards of the answers that are compared with each other (`Trajectory.comparable_reward`)."""
    return [reward for t in group.trajectories if (reward := t.comparable_reward(truncated)) is not None]


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group can teach anything: two of the `compared` rewards differ."""
    return len(rewards) > 1 and min(rewards) != max(rewards)


class DynamicSampling:
    """Which finished groups are kept, and when to give up. A pure state machine."""

    def __init__(self, batch_size: int, without_signal: int = 0) -> None:
        """`without_signal`: how many groups in a row had none before, whose rewards are not known any more."""
        self.limit = max(BATCHES * batch_size, AT_LEAST)
        self._before = without_signal
        self._without_signal: list[Sequence[float]] = []  # of the groups since the last that had a signal

    @property
    def without_signal(self) -> int:
        """How many groups in a row had no signal."""
        return self._before + len(self._without_signal)

    def keep(self, rewards: Sequence[float]) -> bool:
        """Whether the group of these `compared` rewards is to be trained; False: replace it.

        Raises:
            RunError: it is the `limit`-th in a row to be replaced.
        """
        if has_signal(rewards):
            self._before = 0
            self._without_signal.clear()
            return True
        self._without_signal.append(rewards)
        if self.without_signal >= self.limit:
            raise RunError(self._what_was_seen())
        return False

    def _what_was_seen(self) -> str:
        """And what can be done about it; one line."""
        groups = self._without_signal
        rewards = [reward for group in groups for reward in group]
        if len(set(rewards)) > 1:
            mean = sum(rewards) / len(rewards)
            scores = f"mean {mean:.3g}, from {min(rewards):g} to {max(rewards):g}"
        else:
            scores = f"every answer scored {rewards[0]:g}" if rewards else "none"
        since = f"of the last {len(groups)}: " if self._before else ""
        small = sum(len(group) < 2 for group in groups)
        few = f"; {small} of them had fewer than two answers to compare" if small else ""
        return (
            f"{self.without_signal} groups in a row had no signal: all answers to a prompt had one reward "
            f"({since}{scores}{few}), "
            "and algorithm.dynamic_sampling drops such groups; give it easier problems if none are solved, harder ones "
            "if all are, a larger rollout.group_size, or set algorithm.dynamic_sampling = false"
        )
