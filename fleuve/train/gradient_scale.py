"""The identity whose gradient is multiplied: for what gets its gradient from several places, or from several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x`, whose gradient comes back multiplied with `factor`."""
    return _ScaledGradient.apply(x, factor)  # type: ignore[no-any-return]


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None
