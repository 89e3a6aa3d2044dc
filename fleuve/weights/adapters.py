"""Low-rank changes to a model's matrices (LoRA, Hu et al. 2021) as they are published: W = W0 + B·A.

Of the matrix `NAME.weight` [out, in] there are `NAME.lora_A` [r, in] and `NAME.lora_B` [out, r], alpha/r multiplied
into the latter. W0 is the matrix of the model that training began with. Whoever holds that can take up any version
without those before it, and each is computed from W0 alone, so that no rounding adds up from version to version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

A, B = ".lora_A", ".lora_B"
WEIGHT = ".weight"


class Adapter(NamedTuple):
    """What is added to a matrix [out, in]: `b` [out, r] times `a` [r, in]."""

    a: Tensor
    b: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.b.shape[0], self.a.shape[1]


def named(adapters: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """Adapters by their matrices' names, to tensors by the names that they are published under."""
    tensors: dict[str, Tensor] = {}
    for name, adapter in adapters.items():
        stem = name.removesuffix(WEIGHT)
        tensors |= {stem + A: adapter.a, stem + B: adapter.b}
    return tensors


def adapters_of(tensors: Mapping[str, Tensor]) -> dict[str, Adapter]:
    """The way back: adapters by the names of their matrices; empty where `tensors` are whole weights.

    Raises:
        ValueError: there are whole weights among adapters, half of an adapter, or one that is no product. Says which.
    """
    stems = {name[: -len(A)] for name in tensors if name.endswith((A, B))}
    if not stems:
        return {}
    pairs = {stem + end for stem in stems for end in (A, B)}
    if odd := sorted(pairs ^ tensors.keys()):
        what = "is missing" if odd[0] in pairs else "is among adapters, and no part of one"
        raise ValueError(f"{odd[0]} {what}")
    adapters = {stem + WEIGHT: Adapter(tensors[stem + A], tensors[stem + B]) for stem in sorted(stems)}
    for name, (a, b) in adapters.items():
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ValueError(f"{name}: {tuple(b.shape)} and {tuple(a.shape)} have no product")
    return adapters


def merged(base: Tensor, adapter: Adapter) -> Tensor:
    """W0 + B·A, computed in fp32 where W0 lies, and rounded once, to W0's dtype. A B of zeros gives W0, bit for bit."""
    a, b = (part.to(base.device, torch.float32) for part in adapter)
    return torch.addmm(base.float(), b, a).to(base.dtype)
