"""How good an answer was, compared with the other answers to the same prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-6
"""Added to a group's standard deviation, so that nearly equal rewards do not become huge advantages."""


def group_relative(rewards: Sequence[float | None], normalise: bool = True) -> list[float | None]:
    """The group-relative advantages of GRPO: reward less the group's mean, divided by its standard deviation.

    Without `normalise` the division is left out (as Dr. GRPO proposes: dividing favours prompts that are nearly always
    or nearly never solved). The statistics are those of the answers that have a reward; the others, None, neither
    get an advantage nor shift anybody else's. One answer alone, or answers that all tie, have nothing to learn from
    each other: exactly zero.

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; unbiased standard deviation plus `EPSILON`.

    Args:
        rewards: of one group's answers, `[samples]`.
        normalise: divide by the standard deviation.

    Returns:
        `[samples]`, None where the reward is None.

    Raises:
        ValueError: a reward is NaN or infinite.

    Example:
        >>> group_relative([1.0, None, 0.0, 0.0, 1.0], normalise=False)
        [0.5, None, -0.5, -0.5, 0.5]
    """
    valid = [r for r in rewards if r is not None]
    if not all(map(math.isfinite, valid)):
        raise ValueError(f"a reward is not finite: {valid}")
    if not valid or min(valid) == max(valid):
        return [None if r is None else 0.0 for r in rewards]
    mean = math.fsum(valid) / len(valid)
    scale = 1.0
    if normalise:
        scale = math.sqrt(math.fsum((r - mean) ** 2 for r in valid) / (len(valid) - 1)) + EPSILON
    return [None if r is None else (r - mean) / scale for r in rewards]
