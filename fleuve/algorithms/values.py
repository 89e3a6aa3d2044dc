"""The critic's loss: squared error against the returns, clipped around the values that the step started from.

With V the critic's value now, V_old its value at the start of the step, R the return and ε the clip:

    loss = Σ_t  m_t · ½ · max( (V_t − R_t)², (clip(V_t, V_old_t − ε, V_old_t + ε) − R_t)² )  /  N

Where the clipped term is the larger, V has already moved past ± ε towards R, and the gradient is zero: one step cannot
move a value much further than ε. A value that moved *away* from its return by more keeps its gradient.

Sources: Schulman et al. 2017 (PPO) and its published implementation; Engstrom et al. 2020, "Implementation matters in
deep policy gradients", which first wrote the clip of the value down.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fleuve.algorithms.ratios import upcast


class ValueSums(NamedTuple):
    """What a loss call saw, as sums over its tokens (detached fp64 scalars), so that micro-batches can be added up.

    `returns` and `errors` (R − V_old) come with their squares: fp64, as variances are made of their differences.
    """

    tokens: Tensor
    loss: Tensor
    clipped: Tensor
    old_values: Tensor
    returns: Tensor
    returns_squared: Tensor
    errors: Tensor
    errors_squared: Tensor

    def __add__(self, other: object) -> ValueSums:
        if not isinstance(other, ValueSums):
            return NotImplemented
        return ValueSums(*(a + b for a, b in zip(self, other, strict=True)))

    def metrics(self) -> dict[str, float]:
        """The sums as means over tokens, by their metric names.

        `critic/explained_variance` is 1 − Var(R − V_old) / Var(R): 1 for a critic that foretold the returns before it
        learnt from them, 0 for one that is no better than a constant, negative for a worse one. Left out where the
        returns do not vary. `critic/value_mean` is the mean of V_old, from which the advantages were made.
        """
        n, loss, clipped, old_values, *moments = (float(x) for x in self)
        if n == 0:
            return {}
        metrics = {
            "critic/loss": loss / n,
            "critic/clip_fraction": clipped / n,
            "critic/value_mean": old_values / n,
        }
        returns, returns_squared, errors, errors_squared = (x / n for x in moments)
        variance = returns_squared - returns**2
        if variance > 1e-12 * returns_squared:  # below it is what rounding leaves of a difference of equals
            metrics["critic/explained_variance"] = 1.0 - (errors_squared - errors**2) / variance
        return metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    denominator: float,
    clip: float | None,
) -> tuple[Tensor, ValueSums]:
    """The clipped value loss of one micro-batch, and sums to judge it by. All inputs are `[tokens]`.

    Args:
        values: of the critic now; the only input that gets a gradient. bf16 is computed in fp32.
        old_values: of the critic at the start of the step.
        returns: what the values should be.
        loss_mask: False for tokens that must not count; their inputs may be anything, even NaN.
        denominator: N, over the *whole* minibatch and all ranks, so that how it was split does not show.
        clip: ε, in units of reward (None: plain squared error).

    Returns:
        The loss (a scalar with gradient) and its `ValueSums`.

    Example: value 0 (old 0), return 1, N = 1: loss ½, gradient −1, whatever the clip. Value 0.5 (old 0), clip 0.2: the
    clipped value 0.2 has the larger error, so the loss is ½ · 0.8² and the gradient 0.
    """
    value = torch.where(loss_mask, upcast(values), 0.0)
    old = torch.where(loss_mask, upcast(old_values.detach()), 0.0)
    target = torch.where(loss_mask, upcast(returns.detach()), 0.0)

    error = (value - target).square()
    if clip is None:
        cut = torch.zeros_like(loss_mask)
    else:
        clipped_error = (value.clamp(old - clip, old + clip) - target).square()
        cut = (clipped_error > error) & loss_mask
        error = torch.where(cut, clipped_error, error)
    loss = 0.5 * error.sum() / denominator

    with torch.no_grad():
        mask, value_before, goal = loss_mask.double(), old.double(), target.double()
        before = goal - value_before
        sums = ValueSums(
            tokens=mask.sum(),
            loss=0.5 * error.double().sum(),
            clipped=cut.double().sum(),
            old_values=value_before.sum(),
            returns=goal.sum(),
            returns_squared=goal.square().sum(),
            errors=before.sum(),
            errors_squared=before.square().sum(),
        )
    return loss, sums
