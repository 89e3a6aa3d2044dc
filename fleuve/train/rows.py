"""Numbers of which several ranks compute some each, one a row, brought together with their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor


def whole_of(own: Tensor, ends: Sequence[int], rank: int, group: dist.ProcessGroup) -> Tensor:
    """`[rows]` out of each rank's part: of rank i those from `ends[i]` to `ends[i + 1]`. On each rank only its `own`
    carry gradient."""
    sizes = [end - begin for begin, end in pairwise(ends)]
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own.detach()
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    parts = [g[:n] for g, n in zip(gathered, sizes, strict=True)]
    parts[rank] = own
    return torch.cat(parts)
