"""The KV cache: one slab of memory for each capacity class, the rows in use side by side at its start.

There are no custom kernels here, so nothing may be gathered page by page: because rows in use are dense, attention over
a whole class reads one contiguous view. A row that leaves is filled with the last one; a sequence that outgrows its
class is copied to the next, twice as large, which costs one copy of each token over its life. Slabs double and halve
with the number of their rows.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fleuve.engine.scheduler import Copy, Move, Release, Resize
from fleuve.engine.sequence import Sequence

SMALLEST_SLAB = 4  # rows
ALIGNMENT = 64  # bytes: of a cache line and of the widest vector


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of one cached position."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(eq=False, slots=True)
class Slab:
    """The rows of one capacity; those of `owners` are the first of them.

    `keys` are [layers, allocated, kv_heads, key_dim, capacity], `values` [layers, allocated, kv_heads, capacity,
    value_dim]: each the way round that makes the decode's two batched products fastest on a CPU (keys as a transposed
    view of the usual order cost 3 to 4 times as much in bf16).
    """

    capacity: int
    keys: Tensor
    values: Tensor
    owners: list[Sequence] = field(default_factory=list)

    @property
    def allocated(self) -> int:
        """Rows there is memory for."""
        return self.keys.shape[1]


class KVCache:
    """Carries out what the scheduler decided. Memory is zeroed when allocated: masked positions are multiplied by a
    weight of zero, which must not meet a NaN."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.slabs: dict[int, Slab] = {}
        self._places: dict[Sequence, tuple[Slab, int]] = {}

    def place(self, sequence: Sequence) -> tuple[Slab, int]:
        """The slab and row of a sequence that has one."""
        return self._places[sequence]

    def apply(self, moves: list[Move]) -> None:
        """Carry out a plan's moves, in order."""
        for capacity, count in Counter(m.capacity for m in moves if isinstance(m, Resize)).items():
            self._reserve(capacity, count)
        for move in moves:
            match move:
                case Resize(sequence, capacity, keep):
                    self._resize(sequence, capacity, keep)
                case Release(sequence):
                    self._release(*self._places.pop(sequence))
                case Copy(donor, sequence, tokens):
                    self._copy(self._places[donor], self._places[sequence], tokens)

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero all memory: after weights whose keys or values may not have been finite."""
        for slab in self.slabs.values():
            slab.keys.zero_()
            slab.values.zero_()

    def _resize(self, sequence: Sequence, capacity: int, keep: int) -> None:
        old = self._places.get(sequence)
        slab = self._reserve(capacity, 1)
        new = (slab, len(slab.owners))
        slab.owners.append(sequence)
        self._places[sequence] = new
        if old is not None:
            self._copy(old, new, keep)
            self._release(*old)

    def _reserve(self, capacity: int, more: int) -> Slab:
        """The slab of this capacity, with room for `more` rows: grown once for all that a plan adds."""
        slab = self.slabs.get(capacity)
        rows = SMALLEST_SLAB if slab is None else slab.allocated
        while rows < more + (0 if slab is None else len(slab.owners)):
            rows *= 2
        if slab is None:
            slab = self.slabs[capacity] = Slab(capacity, *self._memory(rows, capacity))
        elif rows > slab.allocated:
            self._reallocate(slab, rows)
        return slab

    def _release(self, slab: Slab, row: int) -> None:
        last = slab.owners.pop()
        if row < len(slab.owners):
            slab.keys[:, row] = slab.keys[:, len(slab.owners)]
            slab.values[:, row] = slab.values[:, len(slab.owners)]
            slab.owners[row] = last
            self._places[last] = (slab, row)
        if not slab.owners:
            del self.slabs[slab.capacity]
        elif SMALLEST_SLAB < slab.allocated >= 4 * len(slab.owners):
            self._reallocate(slab, slab.allocated // 2)

    def _copy(self, source: tuple[Slab, int], target: tuple[Slab, int], tokens: int) -> None:
        if tokens:
            (a, i), (b, j) = source, target
            b.keys[:, j, :, :, :tokens] = a.keys[:, i, :, :, :tokens]
            b.values[:, j, :, :tokens] = a.values[:, i, :, :tokens]

    def _memory(self, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
        head = (self.layout.layers, rows, self.layout.kv_heads)
        keys, values = (*head, self.layout.key_dim, capacity), (*head, capacity, self.layout.value_dim)
        return _zeros(keys, self.dtype, self.device), _zeros(values, self.dtype, self.device)

    def _reallocate(self, slab: Slab, rows: int) -> None:
        keys, values = self._memory(rows, slab.capacity)
        used = len(slab.owners)
        keys[:, :used] = slab.keys[:, :used]
        values[:, :used] = slab.values[:, :used]
        slab.keys, slab.values = keys, values


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU such that a page costs nothing until it is written (numpy asks the system for zeroed pages, and
    for huge ones; torch writes the zeros)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
