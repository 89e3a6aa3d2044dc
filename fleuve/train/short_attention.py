"""Causal attention over short sequences as plain matrix products, for CPUs that multiply bf16 matrices in hardware.

torch's fused CPU kernel does not use those instructions well. Below some 700 tokens, plain products over whole
`[length, length]` score matrices win although half of each is thrown away: forward and backward of 32 sequences of 200
tokens, 9 heads of 64, took 273 ms against 736 ms. The heads of a key-value group are folded into one product.

Nothing quadratic is kept for the backward pass: the probabilities are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def short_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """`query` [tokens, heads, head_dim], `key` and `value` [tokens, kv_heads, head_dim] to [tokens, heads, head_dim].

    Causal inside each of the sequences, `lengths` long, that are packed along the token axis.
    """
    out: Tensor = _ShortAttention.apply(query, key, value, list(lengths), scale)
    return out


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.lengths, ctx.scale = lengths, scale
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        future = _future(max(lengths), query)
        for q, k, v, o in zip(*(x.split(lengths) for x in (query, key, value, out)), strict=True):
            weights = _weights(_fold(q, k.shape[1]), k, scale, future)
            _unfold_into(o, torch.bmm(weights, v.transpose(0, 1)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value = ctx.saved_tensors
        d_query, d_key, d_value = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
        )
        future = _future(max(ctx.lengths), query)
        parts = (x.split(ctx.lengths) for x in (query, key, value, grads[0], d_query, d_key, d_value))
        for q, k, v, g, dq, dk, dv in zip(*parts, strict=True):
            folded, gradient = _fold(q, k.shape[1]), _fold(g, k.shape[1])
            weights = _weights(folded, k, ctx.scale, future)
            dv.copy_(torch.bmm(weights.transpose(1, 2), gradient).transpose(0, 1))
            d_weights = torch.bmm(gradient, v.permute(1, 2, 0))
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(ctx.scale)
            _unfold_into(dq, torch.bmm(d_scores, k.transpose(0, 1)))
            dk.copy_(torch.bmm(d_scores.transpose(1, 2), folded).transpose(0, 1))
        return d_query, d_key, d_value, None, None


def _future(length: int, like: Tensor) -> Tensor:
    """[length, length] to be added to scores: −inf where the key comes after the query."""
    return torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[length, heads, dim] to [kv_heads, group · length, dim]: one matrix a key-value head."""
    length, heads, dim = x.shape
    group = heads // kv_heads
    return x.reshape(length, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * length, dim)


def _unfold_into(out: Tensor, folded: Tensor) -> None:
    """The inverse of `_fold`, written to `out` [length, heads, dim]."""
    length, heads, dim = out.shape
    kv_heads = folded.shape[0]
    group = heads // kv_heads
    out.view(length, kv_heads, group, dim).copy_(folded.view(kv_heads, group, length, dim).permute(2, 0, 1, 3))


def _weights(folded: Tensor, key: Tensor, scale: float, future: Tensor) -> Tensor:
    """Attention probabilities [kv_heads, group · length, length]."""
    length = key.shape[0]
    scores = torch.bmm(folded, key.permute(1, 2, 0)).mul_(scale)
    scores.view(key.shape[1], -1, length, length).add_(future[:length, :length])
    return scores.softmax(-1)
