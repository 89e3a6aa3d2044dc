"""How much better an answer, or a token, was than expected: advantages.

Per answer (`group_relative`, `leave_one_out`, `without_baseline`): lists of one number an answer to the same prompt,
None for an answer that is rejected: its reward is missing, NaN or infinite. Rejected answers get no advantage and shift
nobody else's. Per token (`reward_to_go`, `gae`, `whiten`): tensors `[tokens]` of one answer, without gradient.

    GRPO                     group_relative
    Dr. GRPO                 group_relative without `normalise`
    RLOO                     leave_one_out
    REINFORCE++              without_baseline, then whiten over the batch (Hu 2025)
    REINFORCE++ (baseline)   group_relative without `normalise`, then whiten over the batch
    PPO                      gae with a critic's values, then whiten over the batch
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fleuve.algorithms.ratios import upcast

EPSILON = 1e-6
"""Added to a group's standard deviation, so that nearly equal rewards do not become huge advantages."""

VARIANCE_EPSILON = 1e-8
"""Added to a batch's variance, for the same reason."""


def group_relative(rewards: Sequence[float | None], normalise: bool = True) -> list[float | None]:
    """The group-relative advantages of GRPO: reward less the group's mean, divided by its standard deviation.

        A_i = (r_i − mean(r)) / (std(r) + ε)

    Without `normalise` the division is left out (as Dr. GRPO proposes: dividing favours prompts that are nearly always
    or nearly never solved). The statistics are those of the answers that have a finite reward; the others neither get
    an advantage nor shift anybody else's. One answer alone, or answers that all tie, have nothing to learn from each
    other: exactly zero.

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; unbiased standard deviation plus `EPSILON`. Liu et al. 2025
    (Dr. GRPO).

    Args:
        rewards: of one group's answers, `[samples]`.
        normalise: divide by the standard deviation.

    Returns:
        `[samples]`, None where the reward is None, NaN or infinite.

    Example:
        >>> group_relative([1.0, None, 0.0, 0.0, 1.0], normalise=False)
        [0.5, None, -0.5, -0.5, 0.5]
    """
    rewards = without_baseline(rewards)
    valid = [r for r in rewards if r is not None]
    if _all_tie(valid):
        return [None if r is None else 0.0 for r in rewards]
    unit = _unit(valid)
    mean = math.fsum(r / unit for r in valid) / len(valid)
    scale = 1.0 / unit
    if normalise:
        scale = math.sqrt(math.fsum((r / unit - mean) ** 2 for r in valid) / (len(valid) - 1)) + EPSILON / unit
    return [None if r is None else (r / unit - mean) / scale for r in rewards]


def leave_one_out(rewards: Sequence[float | None]) -> list[float | None]:
    """RLOO: reward less the mean of the *other* answers, a baseline that does not depend on the answer itself.

        A_i = r_i − mean_{j ≠ i} r_j = (r_i − mean(r)) · n / (n − 1)

    One answer alone, or answers that all tie: exactly zero.

    Source: Kool et al. 2019; Ahmadian et al. 2024.

    Args:
        rewards: of one group's answers, `[samples]`.

    Returns:
        `[samples]`, None where the reward is None, NaN or infinite.

    Example:
        >>> leave_one_out([1.0, None, 0.0, 0.0])
        [1.0, None, -0.5, -0.5]
    """
    rewards = without_baseline(rewards)
    valid = [r for r in rewards if r is not None]
    if _all_tie(valid):
        return [None if r is None else 0.0 for r in rewards]
    unit, others = _unit(valid), len(valid) - 1
    total = math.fsum(r / unit for r in valid)
    return [None if r is None else (r / unit - (total - r / unit) / others) * unit for r in rewards]


def without_baseline(rewards: Sequence[float | None]) -> list[float | None]:
    """The rewards themselves, `[samples]`, None where they are None, NaN or infinite (Williams 1992; Hu 2025)."""
    return [r if r is not None and math.isfinite(r) else None for r in rewards]


def reward_to_go(token_rewards: Tensor, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each token on:  R_t = r_t + γ R_{t+1}.  `[tokens]` of one answer."""
    return _discounted(token_rewards.detach(), gamma)


def gae(token_rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation for one answer.

        δ_t = r_t + γ V_{t+1} − V_t,    A_t = δ_t + γ λ A_{t+1},    returns R_t = A_t + V_t

    with V = 0 after the last token: an answer that ended has nothing more to come. λ = 1 gives reward-to-go less value,
    λ = 0 the one-step temporal difference.

    Source: Schulman et al. 2016, eqs. 11 and 16.

    Args:
        token_rewards: `[tokens]`; commonly zero but for the last.
        values: `[tokens]`, the critic's at the state *before* each token.
        gamma, lam: γ and λ.

    Returns:
        Advantages and returns (the critic's targets), both `[tokens]` and without gradient.
    """
    rewards, values = upcast(token_rewards.detach()), upcast(values.detach())
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    advantages = _discounted(rewards + gamma * following - values, gamma * lam)
    return advantages, advantages + values


def whiten(per_answer: Sequence[Tensor], shift_mean: bool = True) -> list[Tensor]:
    """Each token's number less the mean of all tokens of the batch, divided by their (unbiased) standard deviation.

        x' = (x − mean) / sqrt(var + ε)    and, where not `shift_mean`, + mean: only the scale changes

    The statistics are those of the tokens given, so `per_answer` must be the whole batch, and only learnt tokens. Fewer
    than two tokens, or tokens that all tie, have no scale: zero (the mean, where not `shift_mean`).

    Args:
        per_answer: a tensor `[tokens]` for each answer.
        shift_mean: take the mean out.

    Returns:
        As `per_answer`, without gradient, at least in float32.
    """
    if not per_answer:
        return []
    x = upcast(torch.cat([a.detach() for a in per_answer]))
    mean = x.mean() if len(x) else x.sum()
    centred = x - mean
    if len(x) < 2 or bool(x.min() == x.max()):
        whitened = torch.zeros_like(x)
    else:
        whitened = centred * torch.rsqrt(centred.square().sum() / (len(x) - 1) + VARIANCE_EPSILON)
    if not shift_mean:
        whitened = whitened + mean
    return list(whitened.split([len(a) for a in per_answer]))


def _all_tie(valid: Sequence[float]) -> bool:
    """Whether there is nothing to compare: no answer, one, or all the same."""
    return not valid or min(valid) == max(valid)


def _unit(valid: Sequence[float]) -> float:
    """What to measure rewards in so that neither their squares nor their sums overflow: 1 unless they are huge, and
    always a power of two, by which one divides without rounding."""
    _, exponent = math.frexp(max(abs(r) for r in valid))
    return 2.0 ** max(0, exponent - 500)


def _discounted(x: Tensor, factor: float) -> Tensor:
    """`[tokens]`: y_t = x_t + factor · y_{t+1}, summed in double precision."""
    total, sums = 0.0, []
    for value in reversed(x.tolist()):
        total = value + factor * total
        sums.append(total)
    return torch.tensor(sums[::-1], dtype=upcast(x).dtype, device=x.device)
