"""Attention over sequences packed end to end: causal inside each, and nothing of one ever reaches another.

One call of torch's fused kernel a sequence. On a CPU this is faster than padded batches of like lengths, even for
sequences of 100 tokens, as it computes nothing that is not needed and no mask is ever made: measured in fp32, forward
and backward of 64 sequences of 20 to 180 tokens, 24 ms against 32 to 37 ms in buckets and 58 ms in one padded batch.
Short sequences in bf16 on a CPU go to `short_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fleuve.train.short_attention import short_attention

SHORT = 512
"""Tokens: in bf16 on a CPU, packs without any longer sequence take `short_attention`."""


class PackedAttention:
    """The training side of `fleuve.modeling.attention.Attention`.

    Args:
        lengths: tokens of each sequence, in the order in which they are packed.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._windows: dict[tuple[int, int, torch.device], Tensor] = {}

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
        """`query` [tokens, heads, head_dim], `key` and `value` [tokens, kv_heads, head_dim] to [tokens, heads,
        head_dim]; see the protocol."""
        longest = max(self.lengths)
        plain = softcap is None and (window is None or window >= longest)
        if plain and longest <= SHORT and query.dtype == torch.bfloat16 and query.device.type == "cpu":
            return short_attention(query, key, value, self.lengths, scale)
        pieces = []
        for q, k, v in zip(*(x.split(self.lengths) for x in (query, key, value)), strict=True):
            length = q.shape[0]
            mask = self._window(length, window, q.device) if window is not None and window < length else None
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, length, head_dim]
            if softcap is None:
                out = scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
                )
            else:
                mask = self._window(length, length, q.device) if mask is None else mask
                out = _softcapped(q, k, v, mask, scale, softcap)
            pieces.append(out[0].transpose(0, 1))
        return torch.cat(pieces)

    def _window(self, length: int, window: int, device: torch.device) -> Tensor:
        """Bool [length, length]: position i sees i − window + 1 … i. Made once a length, shared by all layers."""
        found = self._windows.get((length, window, device))
        if found is None:
            back = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
            found = self._windows[length, window, device] = (back >= 0) & (back < window)
        return found


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention with scores squashed to ± `softcap` (Gemma 2), which no fused kernel offers on every device."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.to(v.dtype) @ v
