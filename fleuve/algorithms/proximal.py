"""The proximal policy without a forward pass of its own: interpolated between the sampler and the current policy."""

from __future__ import annotations

import torch
from torch import Tensor

from fleuve.algorithms.ratios import upcast


def interpolate(logprobs: Tensor, behaviour_logprobs: Tensor, staleness: Tensor, progress: float) -> Tensor:
    """log π_prox ≈ log π_behav + α (log π_θ − log π_behav), by how far along the way from one to the other it lies.

    Measure policies by version, and say that the step starts from version v. A token of staleness d was sampled by
    version v − d. The proximal policy is v. After a fraction p of the step's updates, θ is at v + p (the whole step
    makes v + 1). Suppose that a token's log-probability moves evenly from version to version: at v it has then covered

        α = (v − (v − d)) / (v + p − (v − d)) = d / (d + p)

    of the way from the behaviour policy to θ. Hence

        d = 0           α = 0: sampled by the version that the step starts from, a token is exactly its own proximal
        p = 0, d ≥ 1    α = 1: before the first update θ *is* the proximal policy, exactly
        d = p = 0       both are the same policy; 0 / 0 counts as 0

    As published α is (v_prox − v_behav) / (v_θ − v_behav) with v_prox = v_θ − 1 all through the step: d / (d + 1),
    which is p = 1.

    Source: Li et al. 2025 (A-3PO).

    Args:
        logprobs: log π_θ, `[tokens]`, of the current weights; taken without gradient.
        behaviour_logprobs: log π_behav, `[tokens]`, recorded at sampling.
        staleness: d, `[tokens]`: versions between the one that the step starts from and the one that sampled.
        progress: p, from 0 (first update of the step) to below 1: updates already made / updates of the step.

    Returns:
        log π_prox, `[tokens]`, without gradient, at least in float32.

    Example:
        >>> interpolate(torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, -3.0]), torch.tensor([0, 1]), 1.0).tolist()
        [-3.0, -2.0]
    """
    current, behaviour = upcast(logprobs.detach()), upcast(behaviour_logprobs.detach())
    behind = staleness.to(current.dtype).clamp(min=0.0)
    alpha = torch.where(behind > 0, behind / (behind + progress), 0.0).to(current.dtype)
    # lerp, not the formula above: at α = 0 and α = 1 it gives its ends to the last bit.
    return torch.lerp(behaviour.to(current.dtype), current, alpha)
