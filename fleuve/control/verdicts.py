"""What any workflow hands in, checked at the controller's door."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleuve.types import Trajectory


def exclude_nonfinite(trajectories: Sequence[Trajectory]) -> None:
    """A reward that is NaN or infinite is no verdict: such an answer is excluded, and says why.

    Built-in and `module:function` verifiers are watched where they run; this is for workflows and rewarders of any
    other kind. One NaN would otherwise be the mean, and so every advantage, of its group.
    """
    for trajectory in trajectories:
        if trajectory.reward is not None and not math.isfinite(trajectory.reward):
            trajectory.excluded = f"its reward is {trajectory.reward}"
            trajectory.reward = None
