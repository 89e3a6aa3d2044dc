"""What is done to a reward before advantages are taken: scaled, clipped, shortened for length, spread over tokens."""

from __future__ import annotations

import math

from torch import Tensor

from fleuve.algorithms.ratios import upcast


def overlong_penalty(length: int, max_length: int, buffer: int, scale: float = 1.0) -> float:
    """What is added to the reward of an answer of `length` tokens for being nearly too long: from 0 down to −`scale`.

        0                                           length ≤ max_length − buffer
        ((max_length − buffer) − length) / buffer   up to max_length
        −1                                          beyond

    times `scale`: a slope in place of a cliff at the length where answers are cut off. `buffer` 0 is the cliff.

    Source: Yu et al. 2025 (DAPO, soft overlong punishment), eq. 13.

    Example:
        >>> [overlong_penalty(n, max_length=100, buffer=20) for n in (80, 90, 100, 101)]
        [0.0, -0.5, -1.0, -1.0]
    """
    if length > max_length:
        return -scale
    over = length - (max_length - buffer)
    return -scale * (over / buffer) if over > 0 else 0.0


def scaled(reward: float | None, scale: float = 1.0, low: float = -math.inf, high: float = math.inf) -> float | None:
    """`reward` · `scale`, then clipped to `low` … `high`. None, NaN and infinity stay no reward: None.

    (Clipping alone would turn infinity, and by the order of a comparison even NaN, into the best of rewards.)
    """
    if reward is None or not math.isfinite(reward):
        return None
    return min(max(reward * scale, low), high)


def token_rewards(reward: float, kl: Tensor, coefficient: float) -> Tensor:
    """An answer's reward as rewards of its tokens: the KL penalty at each, the reward itself at the last.

        r_t = −coefficient · kl_t + [t is the last token] · reward

    Unlike a penalty in the loss this one reaches back: a token pays for the divergence that it leads to.

    Source: Stiennon et al. 2020; Ouyang et al. 2022, eq. 2 (token by token).

    Args:
        reward: of the whole answer.
        kl: `[tokens]`, an estimator's values (see `kl`); zeros for no penalty. Taken without gradient.
        coefficient: β.

    Returns:
        `[tokens]`, at least in float32; empty for an answer without tokens.
    """
    rewards = -coefficient * upcast(kl.detach())
    if len(rewards):
        rewards[-1] += reward
    return rewards
