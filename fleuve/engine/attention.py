"""Attention over the KV cache for the packed tokens of one step.

Tokens are ordered by capacity class, and within a class first those of sequences that feed a single token, by row, then
longer chunks. So a class takes one indexed write for its keys and one for its values, one attention call for all its
single tokens, and one for each longer chunk. Query heads that share a key head are laid along the query axis, which
reads every cached key once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fleuve.engine.kv_cache import Slab


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


class _Class:
    """One slab's part of the step: which tokens, where they are written, what they see."""

    def __init__(self, work: ClassWork, first: int, heads: int, device: torch.device, dtype: torch.dtype) -> None:
        self.slab = work.slab
        self.first = first
        self.singles = len(work.singles)
        self.end = first + self.singles + sum(p.count for p in work.chunks)
        self.chunks = work.chunks
        self.device = device
        self.dtype = dtype
        self._masks: dict[tuple[int, int | None], Tensor] = {}

        rows = np.array([p.row for p in work.singles], dtype=np.int64)
        positions = np.array([p.start for p in work.singles], dtype=np.int64)
        for p in work.chunks:
            rows = np.concatenate([rows, np.full(p.count, p.row)])
            positions = np.concatenate([positions, np.arange(p.start, p.start + p.count)])
        capacity = work.slab.capacity
        heads_of_token = rows[:, None] * (heads * capacity) + np.arange(heads) * capacity + positions[:, None]
        self.slots = torch.from_numpy(heads_of_token.reshape(-1)).to(device)  # [tokens × kv_heads], into flat keys

        if self.singles:
            self.longest = int(positions[: self.singles].max()) + 1
            self.rows = int(rows[self.singles - 1]) + 1
            self.gather: Tensor | None = None
            self.pick: Tensor | None = None
            if self.rows != self.singles:  # some rows of the slab feed no single token now: they compute for nothing
                gather = np.zeros(self.rows, dtype=np.int64)
                gather[rows[: self.singles]] = np.arange(self.singles)
                self.gather = torch.from_numpy(gather).to(device)
                self.pick = torch.from_numpy(rows[: self.singles]).to(device)
            lengths = np.ones(self.rows, dtype=np.int64)
            lengths[rows[: self.singles]] = positions[: self.singles] + 1
            self.lengths = torch.from_numpy(lengths).to(device)

    def single_mask(self, window: int | None) -> Tensor:
        """[rows, 1, 1, longest], added to the scores: 0 for what a row's token sees, −inf for the rest."""
        if (mask := self._masks.get((-1, window))) is None:
            at = torch.arange(self.longest, device=self.device)
            hidden = at >= self.lengths[:, None]
            if window is not None:
                hidden |= at < (self.lengths - window)[:, None]
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
            mask = self._masks[-1, window] = mask[:, None, None, :]
        return mask

    def chunk_mask(self, index: int, window: int | None) -> Tensor:
        """[count, start + count], added to the scores of chunk `index`."""
        if (mask := self._masks.get((index, window))) is None:
            piece = self.chunks[index]
            at = torch.arange(piece.start + piece.count, device=self.device)
            position = at[piece.start :, None]
            hidden = at > position
            if window is not None:
                hidden |= at <= position - window
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
            self._masks[index, window] = mask
        return mask


class CacheAttention:
    """`modeling.attention.Attention` for one step: writes the new keys and values, then attends over the rows."""

    def __init__(self, work: Seq[ClassWork]) -> None:
        self._classes: list[_Class] = []
        first = 0
        for part in work:
            _, _, heads, _, _ = part.slab.keys.shape
            self._classes.append(_Class(part, first, heads, part.slab.keys.device, part.slab.keys.dtype))
            first = self._classes[-1].end

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
        out = query.new_empty((*query.shape[:2], value.shape[-1]))
        for part in self._classes:
            keys, values = part.slab.keys[layer], part.slab.values[layer]
            new = slice(part.first, part.end)
            keys.view(-1, keys.shape[-1]).index_copy_(0, part.slots, key[new].reshape(-1, keys.shape[-1]))
            values.view(-1, values.shape[-1]).index_copy_(0, part.slots, value[new].reshape(-1, values.shape[-1]))
            if part.singles:
                tokens = slice(part.first, part.first + part.singles)
                out[tokens] = _singles(part, query[tokens], keys, values, scale, window, softcap)
            at = part.first + part.singles
            for index, piece in enumerate(part.chunks):
                tokens = slice(at, at + piece.count)
                out[tokens] = _chunk(part, index, query[tokens], keys, values, scale, window, softcap)
                at += piece.count
        return out


def _singles(
    part: _Class, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """`query` [singles, heads, head_dim], one token a row, against the first rows of the slab."""
    if part.gather is not None:
        query = query.index_select(0, part.gather)
    folded = query.unflatten(1, (keys.shape[1], -1))  # [rows, kv_heads, group, head_dim]
    seen_keys, seen_values = keys[: part.rows, :, : part.longest], values[: part.rows, :, : part.longest]
    out = _attend(folded, seen_keys, seen_values, part.single_mask(window), scale, softcap).flatten(1, 2)
    return out if part.pick is None else out.index_select(0, part.pick)


def _chunk(
    part: _Class,
    index: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`query` [count, heads, head_dim] of one sequence, against its row."""
    piece = part.chunks[index]
    length = piece.start + piece.count
    seen_keys, seen_values = keys[piece.row, :, :length], values[piece.row, :, :length]
    count, heads, _ = query.shape
    group = heads // seen_keys.shape[0]
    if piece.start == 0 and softcap is None and (window is None or window >= length):
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            seen_keys.unsqueeze(0).repeat_interleave(group, 1),
            seen_values.unsqueeze(0).repeat_interleave(group, 1),
            is_causal=True,
            scale=scale,
        )
        return out[0].transpose(0, 1)
    # [kv_heads, group × count, head_dim]: the mask repeats for every head of a group
    folded = query.transpose(0, 1).reshape(seen_keys.shape[0], group * count, -1)
    mask = part.chunk_mask(index, window).repeat(group, 1)
    out = _attend(folded.unsqueeze(0), seen_keys.unsqueeze(0), seen_values.unsqueeze(0), mask, scale, softcap)[0]
    return out.reshape(heads, count, -1).transpose(0, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask.expand(*mask.shape[:-2], query.shape[-2], -1), scale=scale
        )
    scores = softcap * torch.tanh(query @ keys.transpose(-1, -2) * (scale / softcap)) + mask
    return scores.float().softmax(-1).to(values.dtype) @ values
