"""KL(π_θ ‖ π_ref), estimated from the tokens that were sampled, and a penalty whose gradient is the right one.

With d = log π_θ − log π_ref at a token sampled from π_θ (Schulman 2020, "Approximating KL divergence"):

    k1 = d                   unbiased, of either sign, high variance
    k2 = d² / 2              biased, never negative
    k3 = exp(−d) − 1 + d     unbiased, never negative

As *values* (in the reward, in the metrics) choose between bias and variance. As a *loss* an estimator is something
else: automatic differentiation sees the sampled token's log-probability only, not that its distribution moves too.
The gradient wanted, token by token, is

    ∇ KL(π_θ ‖ π_ref) = E_{π_θ}[ d · ∇ log π_θ ]

(the term E[∇ log π_θ] is zero). Differentiating k2 gives just that, d ∇ log π_θ. Differentiating k1 gives ∇ log π_θ,
whose expectation is zero: no penalty at all, only noise. Differentiating k3 gives (1 − exp(−d)) ∇ log π_θ, in
expectation the gradient of the *reverse* divergence KL(π_ref ‖ π_θ), near the wanted one only while d is small. So
`kl_penalty` shows the value of the estimator that was asked for, and always has the gradient of k2.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fleuve.algorithms.ratios import bounded, upcast

Estimator = Literal["k1", "k2", "k3"]

LEAST_LOGPROB = -1e4
"""A log-probability below this (−∞ above all) gets no gradient."""


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d, `[tokens]`: unbiased, and negative where the reference finds the token likelier."""
    return bounded(upcast(logprobs) - upcast(reference_logprobs))


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d² / 2, `[tokens]`: biased by the third order of d, never negative."""
    return 0.5 * k1(logprobs, reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(−d) − 1 + d, `[tokens]`: unbiased and never negative."""
    d = k1(logprobs, reference_logprobs)
    # expm1 keeps the digits that exp(−d) − 1 loses when d is small.
    return torch.expm1(-d) + d


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, weight: Tensor, estimator: Estimator = "k3") -> Tensor:
    """The penalty to be added to the loss (times its coefficient), `[tokens]`.

        value     weight · k(d)
        gradient  weight · d · ∇ log π_θ        whatever the estimator (see above)

    It is the divergence at each token given the tokens before it; that choosing a token also changes what comes later
    is not in it (a penalty in the reward has that).

    Source: Schulman 2020 for the estimators; Tang and Munos 2025 ("On a few pitfalls in KL divergence gradient
    estimation for RL") on their gradients.

    Args:
        logprobs: log π_θ, `[tokens]`, with gradient.
        reference_logprobs: log π_ref, `[tokens]`.
        weight: π_θ / π_behav, `[tokens]`, taken without gradient: expectations are over π_θ, and the tokens come from
            older policies. With it value and gradient are right off policy too; ones on policy.
        estimator: whose value is shown.

    Returns:
        `[tokens]`, at least in float32. d is clamped to ± 20, in the gradient too: far from the reference the pull
        back stays, and stays finite.
    """
    weight = upcast(weight.detach())
    current, reference = upcast(logprobs).detach(), upcast(reference_logprobs).detach()
    value = ESTIMATORS[estimator](current, reference)
    # Zero in value and ∇ log π_θ in gradient; from below clamped, so that a log-probability of −∞ is not −∞ − (−∞).
    score = upcast(logprobs).clamp(min=LEAST_LOGPROB)
    score = score - score.detach()
    return weight * (value + k1(current, reference) * score)
