"""The decoupled PPO objective, for tokens that several older policies sampled.

With the log-probabilities of the current (θ), proximal and behaviour policy, r = π_θ / π_prox and w = π_prox / π_behav:

    loss = − Σ_t  m_t · cap(w_t) · min( r_t A_t, clip(r_t, 1 − ε_low, 1 + ε_high) A_t )  /  N

The clip keeps θ near the *proximal* policy, the weights at the start of the step, however old the sampler was; w, which
carries no gradient, corrects for who really sampled. w is always applied. When the proximal policy is taken to be the
behaviour policy itself, w = 1 and what remains is PPO as first published ("naive": its clip is centred on old
weights).

Sources: Hilton et al. 2022 (batch size-invariance, the decoupled objective); Schulman et al. 2017 (PPO); Yu et al. 2025
(DAPO, the asymmetric clip and the sum over tokens); Ye et al. 2020 (the dual clip).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Cap = Literal["mask", "clamp", "none"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before they are exponentiated: e^20 is far beyond any clip, and finite."""


class LossSums(NamedTuple):
    """What a loss call saw, as sums over its tokens (detached scalars), so that micro-batches can be added up."""

    tokens: Tensor
    clipped: Tensor
    capped: Tensor
    weight: Tensor
    weight_squared: Tensor
    kl: Tensor

    def __add__(self, other: object) -> LossSums:
        if not isinstance(other, LossSums):
            return NotImplemented
        return LossSums(*(a + b for a, b in zip(self, other, strict=True)))

    def metrics(self) -> dict[str, float]:
        """The sums as means over tokens, by their metric names.

        `loss/effective_sample_size` is (Σw)² / (n Σw²): 1 when all weights are equal, 1/n when one token has it all.
        `loss/approx_kl` is KL(π_prox ‖ π_θ) by the estimator r − 1 − log r. `loss/capped_fraction` are tokens with
        w > cap.
        """
        sums = [float(x) for x in self]
        tokens, clipped, capped, weight, weight_squared, kl = sums
        if tokens == 0:
            return {}
        return {
            "loss/clip_fraction": clipped / tokens,
            "loss/capped_fraction": capped / tokens,
            "loss/behaviour_weight_mean": weight / tokens,
            "loss/effective_sample_size": weight**2 / (tokens * weight_squared),
            "loss/approx_kl": kl / tokens,
        }


def policy_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    denominator: float,
    clip_low: float,
    clip_high: float,
    cap: Cap,
    cap_value: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, LossSums]:
    """The decoupled PPO loss of one micro-batch, and sums to judge it by. All inputs are `[tokens]`.

    Args:
        logprobs: of the current policy; the only input that gets a gradient.
        proximal_logprobs: of the policy the clip is centred on; pass the behaviour's for naive PPO.
        behaviour_logprobs: of whoever sampled each token, recorded at sampling.
        advantages: one a token.
        loss_mask: False for tokens that must not count; their inputs may be anything, even NaN.
        denominator: N, over the *whole* minibatch and all ranks, so that how it was split does not show.
        clip_low, clip_high: ε_low and ε_high.
        cap: what happens to tokens with w > `cap_value`: dropped (`mask`), w = `cap_value` (`clamp`), nothing (`none`).
        dual_clip: for A < 0 the objective is not let below `dual_clip` · A (None: off).

    Returns:
        The loss (a scalar with gradient) and its `LossSums`.

    Example: one token on policy (r = w = 1) has loss −A / N and gradient −A / N.
    """
    proximal, behaviour = proximal_logprobs.detach(), behaviour_logprobs.detach()
    advantages = torch.where(loss_mask, advantages, 0.0)
    # `where` selects before anything is exponentiated: no inf or NaN of a masked token reaches value or gradient.
    log_ratio = torch.where(loss_mask, logprobs - proximal, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_weight = torch.where(loss_mask, proximal - behaviour, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, weight = log_ratio.exp(), log_weight.exp()

    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    objective = torch.minimum(plain, clipped)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)

    over = (weight > cap_value) & loss_mask
    if cap == "mask":
        kept, applied = loss_mask & ~over, weight
    elif cap == "clamp":
        kept, applied = loss_mask, weight.clamp(max=cap_value)
    else:
        kept, applied = loss_mask, weight
    loss = -torch.where(kept, applied * objective, 0.0).sum() / denominator

    with torch.no_grad():
        mask = loss_mask.to(ratio.dtype)
        sums = LossSums(
            tokens=mask.sum(),
            clipped=((clipped < plain) & loss_mask).sum(),
            capped=over.sum(),
            weight=(weight * mask).sum(),
            weight_squared=(weight.square() * mask).sum(),
            kl=((ratio - 1.0 - log_ratio) * mask).sum(),
        )
    return loss, sums
