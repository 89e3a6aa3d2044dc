"""Attention over the KV cache for the packed tokens of one step.

Tokens are ordered by capacity class, and within a class first those of sequences that feed a single token, by row, then
longer chunks. All the single tokens of a class take one indexed write and two batched products over the contiguous
rows; each longer chunk goes by itself. Query heads that share a key head are laid along the query axis, which reads
every cached key once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fleuve.engine.kv_cache import Slab

MAX_SCORES = 2**22  # of one block of a chunk's queries: 16 MB in fp32


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` tokens of one sequence, at positions `start`, … of `row`."""

    row: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class ClassWork:
    """What one step feeds to one slab: single tokens by ascending row, then longer chunks."""

    slab: Slab
    singles: Seq[Piece]
    chunks: Seq[Piece]


class CacheAttention:
    """`modeling.attention.Attention` for one step: writes the new keys and values, then attends over the rows."""

    def __init__(self, work: Seq[ClassWork]) -> None:
        self._parts: list[_Singles | _Chunk] = []
        first = 0
        for of_class in work:
            if of_class.singles:
                self._parts.append(_Singles(of_class.slab, of_class.singles, first))
                first += len(of_class.singles)
            for piece in of_class.chunks:
                self._parts.append(_Chunk(of_class.slab, piece, first))
                first += piece.count

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        if len(self._parts) == 1:
            return self._parts[0](layer, query, key, value, scale, window, softcap)
        out = query.new_empty((*query.shape[:2], value.shape[-1]))
        for part in self._parts:
            of = part.tokens
            out[of] = part(layer, query[of], key[of], value[of], scale, window, softcap)
        return out


class _Singles:
    """The single tokens of one slab."""

    def __init__(self, slab: Slab, pieces: Seq[Piece], first: int) -> None:
        self.slab = slab
        self.tokens = slice(first, first + len(pieces))
        _, _, heads, key_dim, capacity = slab.keys.shape
        device = slab.keys.device
        rows, positions = np.array([(p.row, p.start) for p in pieces], dtype=np.int64).T
        # The CPU's bf16 product copies operands that are not contiguous, so it gets the rows in their whole length.
        whole = device.type == "cpu" and slab.keys.dtype != torch.float32
        self.longest = capacity if whole else int(positions.max()) + 1
        self.rows = int(rows[-1]) + 1
        of_key = rows * (heads * key_dim * capacity) + positions
        of_value = rows * (heads * capacity) + positions
        # Where the new keys go, an element each, and the new values, a row of value_dim each, in the flat slab.
        self.key_slots = _to(of_key[:, None] + np.arange(heads * key_dim) * capacity, device).view(-1)
        self.value_slots = _to(of_value[:, None] + np.arange(heads) * capacity, device).view(-1)
        lengths = np.ones(self.rows, dtype=np.int64)
        lengths[rows] = positions + 1
        self.lengths = _to(lengths, device)
        self.gather: Tensor | None = None
        self.pick: Tensor | None = None
        if self.rows != len(pieces):  # some rows of the slab feed no single token now: they compute for nothing
            gather = np.zeros(self.rows, dtype=np.int64)
            gather[rows] = np.arange(len(pieces))
            self.gather, self.pick = _to(gather, device), _to(rows, device)
        self._masks: dict[int | None, Tensor] = {}

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        keys, values = self.slab.keys[layer], self.slab.values[layer]
        heads, dtype = keys.shape[1], keys.dtype
        keys.view(-1).index_copy_(0, self.key_slots, key.to(dtype).reshape(-1))
        flat = values.view(-1, values.shape[-1])
        flat.index_copy_(0, self.value_slots, value.to(dtype).reshape(-1, values.shape[-1]))
        folded = query if self.gather is None else query.index_select(0, self.gather)
        folded = (folded.to(dtype) * scale).reshape(self.rows * heads, -1, query.shape[-1])
        seen_keys = keys[: self.rows].flatten(0, 1)[:, :, : self.longest]
        seen_values = values[: self.rows].flatten(0, 1)[:, : self.longest]
        scores = torch.bmm(folded, seen_keys)  # [rows × kv_heads, group, longest]
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores.view(self.rows, -1, self.longest).add_(self._mask(window, dtype))
        out = torch.bmm(scores.softmax(-1), seen_values).view(self.rows, query.shape[1], -1).to(query.dtype)
        return out if self.pick is None else out.index_select(0, self.pick)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[rows, 1, longest], added to the scores: 0 for what a row's token sees, −inf for the rest."""
        if (mask := self._masks.get(window)) is None:
            at = torch.arange(self.longest, device=self.lengths.device)
            hidden = at >= self.lengths[:, None]
            if window is not None:
                hidden |= at < (self.lengths - window)[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            mask = self._masks[window] = mask.unsqueeze(1)
        return mask


class _Chunk:
    """Several tokens of one sequence."""

    def __init__(self, slab: Slab, piece: Piece, first: int) -> None:
        self.slab = slab
        self.row, self.start, self.end = piece.row, piece.start, piece.start + piece.count
        self.tokens = slice(first, first + piece.count)

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        keys, values = self.slab.keys[layer, self.row], self.slab.values[layer, self.row]
        keys[:, :, self.start : self.end] = key.permute(1, 2, 0)
        values[:, self.start : self.end] = value.transpose(0, 1)
        if self.start == 0 and softcap is None and (window is None or window >= self.end):
            group = query.shape[1] // key.shape[1]
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
        seen_keys, seen_values = keys[:, :, : self.end], values[:, : self.end]
        block = max(1, MAX_SCORES // (query.shape[1] * self.end))
        parts = [
            self._block(query[i : i + block], self.start + i, seen_keys, seen_values, scale, window, softcap)
            for i in range(0, len(query), block)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _block(
        self,
        query: Tensor,
        start: int,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """`query` [count, heads, head_dim], its first at position `start`, over all that the row holds."""
        count, heads, _ = query.shape
        folded = (query.to(keys.dtype) * scale).transpose(0, 1).reshape(keys.shape[0], -1, query.shape[-1])
        scores = torch.bmm(folded, keys)  # [kv_heads, group × count, end]
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        at = torch.arange(self.end, device=query.device)
        position = torch.arange(start, start + count, device=query.device)[:, None]
        hidden = at > position
        if window is not None:
            hidden |= at <= position - window
        scores.view(heads, count, -1).masked_fill_(hidden, -torch.inf)
        out = torch.bmm(scores.softmax(-1), values)
        return out.reshape(heads, count, -1).transpose(0, 1).to(query.dtype)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
