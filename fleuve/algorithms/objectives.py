"""What is maximised, token by token: the policy-gradient surrogates that differ in how they bound one update.

All take the same inputs, over the learnt tokens of a micro-batch (`[tokens]`):

    logprobs     log π_θ, with gradient
    log_ratio    log r = log π_θ − log π_prox, with gradient, already selected by the mask and clamped to ± 20
    advantages   A, one a token
    answers      which answer each token belongs to
    clip_low     ε_low: the ratio's lower bound is 1 − ε_low
    clip_high    ε_high: its upper bound is 1 + ε_high (the larger of the two in "clip-higher": Yu et al. 2025, eq. 10)

and give the value to be maximised with the tokens that the bounds touched. Who really sampled a token (w) is the
business of `corrections`, and what the values are divided by that of `aggregation`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fleuve.algorithms.answers import Answers
from fleuve.algorithms.ratios import upcast


class Surrogate(NamedTuple):
    """`value` `[tokens]` is maximised and carries the gradient; `clipped_high` and `clipped_low` `[tokens]` (bool) are
    the tokens on which the upper or the lower bound acted."""

    value: Tensor
    clipped_high: Tensor
    clipped_low: Tensor


def ppo(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    answers: Answers,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO's clipped surrogate, token by token:  min( r A, clip(r, 1 − ε_low, 1 + ε_high) A ).

    With `dual_clip` c > 1, where A < 0:  max( that, c A ), so that one token whose ratio explodes (r > c) cannot
    outweigh everything else. A bound cuts the gradient of its tokens to zero: `clipped_high` are r > 1 + ε_high with
    A > 0 and, under the dual clip, r > c with A < 0; `clipped_low` are r < 1 − ε_low with A < 0.

    Source: Schulman et al. 2017, eq. 7; Ye et al. 2020 (the dual clip).
    """
    return _clipped(upcast(log_ratio).exp(), upcast(advantages), clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    answers: Answers,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """Group sequence policy optimisation: the ratio is the whole answer's, by the geometric mean of its tokens'.

        s_i   = exp( mean over the answer's tokens of log r_t )
        s_i,t = sg[s_i] · π_θ(t) / sg[π_θ(t)]            (value s_i; sg: no gradient)
        min( s_i,t A_t, clip(s_i,t, 1 − ε_low, 1 + ε_high) A_t )

    The token-wise form: each token's gradient is s_i A_t ∇ log π_θ(t). Where A is the same all over an answer, and its
    tokens count alike, the answer's gradient is exactly that of s_i itself (eq. 5 and 10). An answer is clipped as a
    whole, per sign of A. Bounds are much narrower than PPO's (the paper's: 3e-4 and 4e-4), since a geometric mean of
    many ratios is near 1.

    Source: Zheng et al. 2025 (GSPO), eq. 7 and eqs. 13 and 14 (GSPO-token).
    """
    log_ratio = upcast(log_ratio)
    of_answer = answers.spread(answers.mean(log_ratio.detach()))
    # log_ratio − sg[log_ratio] is zero in value and ∇ log π_θ in gradient; through log_ratio, not logprobs, so that a
    # log-probability of −∞, clamped by the caller, does not come back here as −∞ − (−∞).
    ratio = (of_answer + log_ratio - log_ratio.detach()).exp()
    return _clipped(ratio, upcast(advantages), clip_low, clip_high, dual_clip)


def cispo(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    answers: Answers,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Clipped importance-sampling weights:  sg[ clip(r, 1 − ε_low, 1 + ε_high) ] · A · log π_θ.

    No token loses its gradient: a bound limits the *weight* of the token's policy gradient. `clipped_high` and
    `clipped_low` are the tokens whose weight was limited, whatever the sign of A. ε_low ≥ 1 is no lower bound.

    Source: MiniMax 2025 (MiniMax-M1), eqs. 4 and 5.
    """
    ratio = upcast(log_ratio).detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    value = weight * upcast(advantages) * upcast(logprobs)
    return Surrogate(value, ratio > 1.0 + clip_high, ratio < 1.0 - clip_low)


def sapo(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    answers: Answers,
    *,
    clip_low: float = 0.0,
    clip_high: float = 0.0,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Surrogate:
    """Soft adaptive policy optimisation: a smooth gate in place of the clip.

        f(r) = (4 / τ) · sigmoid( τ (r − 1) ),    value f(r) A,    τ = τ_pos where A > 0, else τ_neg

    On policy f'(1) = 1: the policy gradient. Away from it each token's gradient is 4 p (1 − p) r A ∇ log π_θ with
    p = sigmoid(τ (r − 1)), which fades the faster the larger τ is. Nothing is clipped (`clip_low` and `clip_high` have
    no part in it).

    Source: Gao et al. 2025 (SAPO).
    """
    advantages = upcast(advantages)
    ratio = upcast(log_ratio).exp()
    # sigmoid(x) = 1/(1 + e^−x) is exactly 1 for large x, and its gradient exactly 0 there, so e^20 does no harm.
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    value = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * advantages
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(value, nothing, nothing)


def policy_gradient(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    answers: Answers,
    *,
    clip_low: float = 0.0,
    clip_high: float = 0.0,
) -> Surrogate:
    """The plain policy gradient, REINFORCE:  A · log π_θ, without ratio and without bound.

    Right for the first update of a step on fresh answers; w alone corrects for older ones, and nothing corrects for
    the updates made since the step began. (`log_ratio`, `clip_low` and `clip_high` have no part in it.)

    Source: Williams 1992; Ahmadian et al. 2024 (for language models).
    """
    nothing = torch.zeros_like(logprobs, dtype=torch.bool)
    return Surrogate(upcast(advantages) * upcast(logprobs), nothing, nothing)


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """The clipped surrogate of PPO for any ratio `[tokens]`; see `ppo`."""
    plain = ratio * advantages
    value = torch.minimum(plain, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    positive, negative = advantages > 0, advantages < 0
    clipped_high = positive & (ratio > 1.0 + clip_high)
    clipped_low = negative & (ratio < 1.0 - clip_low)
    if dual_clip is not None:
        value = torch.where(negative, torch.maximum(value, dual_clip * advantages), value)
        clipped_high = clipped_high | (negative & (ratio > dual_clip))
    return Surrogate(value, clipped_high, clipped_low)
