"""The model as training sees it: packed micro-batches in, log-probabilities of their learnt tokens out."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fleuve.modeling.forward import hidden_states, logits
from fleuve.train.attention import PackedAttention
from fleuve.train.logprobs import token_logprobs
from fleuve.train.microbatch import MicroBatch


class Policy:
    """A decoder on our attention function.

    Args:
        model: as `modeling.loading` makes it.
        temperature: divides the logits.
        chunk: tokens whose logits exist at once.
        activation_checkpointing: keep only each layer's input, and compute the layer again in the backward pass.
    """

    def __init__(
        self, model: torch.nn.Module, temperature: float, chunk: int, activation_checkpointing: bool = False
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.chunk = chunk
        if activation_checkpointing:
            _checkpoint_layers(model)

    def logprobs(self, m: MicroBatch, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities with gradient, and entropies if asked for; both `[targets]`."""
        hidden = hidden_states(self.model, m.input_ids, m.position_ids, PackedAttention(m.lengths))
        head = partial(logits, self.model)
        return token_logprobs(head, hidden.index_select(0, m.rows), m.targets, self.temperature, self.chunk, entropy)


def _checkpoint_layers(model: torch.nn.Module) -> None:
    """transformers recomputes layers only in training mode; nothing else may change with it, so dropout goes to 0."""
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
