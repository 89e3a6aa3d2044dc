"""Ratios of probabilities from log-probabilities, without overflow and in a precision that can hold them."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before they are exponentiated: e^20 is far beyond any clip, and finite."""


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 when it came in half precision (bf16 has 8 bits: 1.001 would be 1); float32 and float64 as is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def bounded(log_ratio: Tensor) -> Tensor:
    """`log_ratio`, at least in float32 and clamped to ± `MAX_LOG_RATIO`; beyond the bound no gradient comes back."""
    return upcast(log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
