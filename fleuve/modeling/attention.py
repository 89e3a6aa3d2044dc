"""One attention function for training and inference, so that both run the same transformers model definition.

transformers hands every layer's queries, keys and values to the function registered as `"fleuve"`, which passes them
on to the `Attention` object that the caller gave to the model's forward as the keyword `fleuve_attention`: the
trainer's packs sequences side by side, the engine's reads and writes a KV cache. Tokens of all sequences lie along one
axis; there is no padding and hence no mask tensor.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "fleuve"


class Attention(Protocol):
    """What a caller of the model supplies: how the tokens of this forward pass attend to each other."""

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
        """Args: `query` [tokens, heads, head_dim]; `key`, `value` [tokens, kv_heads, head_dim]; `window`: attend to
        the last `window` positions only (None: all). Returns [tokens, heads, head_dim]."""


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    fleuve_attention: Attention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if query.shape[0] != 1:
        raise ValueError(f"packed attention takes one row of tokens, not a batch of {query.shape[0]}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = fleuve_attention(int(module.layer_idx), q, k, v, scale, sliding_window, softcap)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


# No mask function is registered under the name: transformers then builds no mask at all.
AttentionInterface.register(NAME, _attend)
