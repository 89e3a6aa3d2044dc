"""Corrections for who really sampled a token: the importance weight w = π_prox / π_behav, and what bounds it.

Orthogonal to the objective: the per-token loss is −weight · value where `kept`, and nothing elsewhere. All take
`log_weight` = log π_prox − log π_behav `[tokens]` (it gets no gradient; it is clamped to ± 20 before it is
exponentiated, so that w is finite).

`level` says whose weight it is that is bounded *and applied*:

- `token`: each token's own w_t.
- `sequence`: every token of an answer gets the answer's geometric mean, exp(mean_t log w_t), and is bounded by it, so
  that answers are kept or dropped whole. It is neither the product of the token weights, the unbiased weight of a
  whole answer, whose variance grows with length beyond all use, nor w_t kept by its answer's mean.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fleuve.algorithms.answers import Answers
from fleuve.algorithms.ratios import bounded

Level = Literal["token", "sequence"]


class Correction(NamedTuple):
    """`weight` `[tokens]` multiplies the objective of the tokens that are `kept` (`[tokens]`, bool). No gradient."""

    weight: Tensor
    kept: Tensor


def importance_weight(log_weight: Tensor, answers: Answers, level: Level) -> Tensor:
    """`[tokens]`: w before anything bounds it; at `sequence` level the geometric mean over each token's answer."""
    log_weight = bounded(log_weight.detach())
    if level == "sequence":
        log_weight = answers.spread(answers.mean(log_weight))
    return log_weight.exp()


def none(log_weight: Tensor, answers: Answers, *, level: Level = "token") -> Correction:
    """w as it is: without bias, and with whatever variance it has (Hilton et al. 2022)."""
    weight = importance_weight(log_weight, answers, level)
    return Correction(weight, torch.ones_like(weight, dtype=torch.bool))


def clamp(
    log_weight: Tensor, answers: Answers, *, lower: float = 0.0, upper: float, level: Level = "token"
) -> Correction:
    """Truncated importance sampling:  clip(w, lower, upper); every token is kept.

    Source: Ionides 2008, min(w, C); Espeholt et al. 2018 (V-trace, eq. 1) and Yao et al. 2025 (TIS) for policies.
    """
    weight = importance_weight(log_weight, answers, level).clamp(lower, upper)
    return Correction(weight, torch.ones_like(weight, dtype=torch.bool))


def mask(
    log_weight: Tensor, answers: Answers, *, lower: float = 0.0, upper: float, level: Level = "token"
) -> Correction:
    """Masked importance sampling:  w where lower ≤ w ≤ upper, and no gradient from the other tokens.

    With `lower` 0 only tokens that the sampler found too unlikely are dropped. At `sequence` level whole answers are.

    Source: Ling team 2025 (IcePop: two-sided, token level); Liu, Li et al. 2025 (MIS: token and sequence level).
    """
    weight = importance_weight(log_weight, answers, level)
    return Correction(weight, (weight >= lower) & (weight <= upper))


def second_moment_limit(log_weight: Tensor, budget: float = 0.04) -> float:
    """The largest |log w| that may be kept so that the mean of (log w)² over the kept tokens is at most `budget`.

    Masking the token with the largest |log w| again and again until the second moment of the rest fits. `log_weight`
    `[tokens]` are those tokens of a *minibatch* (of all ranks), not of one micro-batch, that have an advantage: the
    result depends neither on how it was split nor on whether the others go through the model too. Tokens that tie at
    the limit are kept or masked together. 0 when nothing fits.

    Source: Zheng et al. 2025 (M2PO, "Prosperity before Collapse"); budget 0.04. There the ratio is π_θ / π_behav,
    which at the first update of a step is w; here what θ does within the step is left to the objective.

    Example:
        >>> second_moment_limit(torch.tensor([0.0, -0.1, 0.2, 3.0]))
        0.20000000298023224
    """
    size = bounded(log_weight.detach()).abs().double().sort().values
    if len(size) == 0:
        return 0.0
    moment = size.square().cumsum(0) / torch.arange(1, len(size) + 1, device=size.device)
    ends_a_tie = torch.ones_like(size, dtype=torch.bool)
    ends_a_tie[:-1] = size[1:] > size[:-1]
    fits = ends_a_tie & (moment <= budget)
    return float(size[fits][-1]) if bool(fits.any()) else 0.0


def second_moment(log_weight: Tensor, limit: float) -> Correction:
    """M2PO's mask:  w where |log w| ≤ `limit` (see `second_moment_limit`), and no gradient from the other tokens."""
    log_weight = bounded(log_weight.detach())
    return Correction(log_weight.exp(), log_weight.abs().double() <= limit)
