"""The model as training sees it: packed micro-batches in, log-probabilities of their learnt tokens out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fleuve.modeling.forward import hidden_states, logits
from fleuve.train.attention import PackedAttention
from fleuve.train.context import Context
from fleuve.train.logprobs import TokenLogprobs, token_logprobs
from fleuve.train.microbatch import MicroBatch


class PolicyOutput(NamedTuple):
    """What one forward pass gives of a micro-batch's learnt tokens, all with gradient: `logprobs` and `entropies`
    `[targets]` (None if not asked for), and `hidden` `[targets, hidden]`, the states that they were predicted from."""

    logprobs: Tensor
    entropies: Tensor | None
    hidden: Tensor


class Policy:
    """A decoder on our attention function.

    Args:
        model: as `modeling.loading` makes it.
        temperature: divides the logits.
        chunk: tokens whose logits exist at once.
        activation_checkpointing: keep only each layer's input, and compute the layer again in the backward pass.
        around: where what is computed of the model has to be computed inside something; see `sharding.ShardedModel`.
        context: the ranks that compute a micro-batch together, if there are several. `outputs` then has no `hidden`.
        token_logprobs: what computes them; several ranks may do so together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        temperature: float,
        chunk: int,
        activation_checkpointing: bool = False,
        around: Callable[[Callable[[torch.nn.Module], Any]], Any] | None = None,
        context: Context | None = None,
        token_logprobs: TokenLogprobs = token_logprobs,
    ) -> None:
        self.model = model
        self._around = around
        self._context = context
        self._token_logprobs = token_logprobs
        self.temperature = temperature
        self.chunk = chunk
        if activation_checkpointing:
            checkpoint_layers(model)

    def hidden(self, m: MicroBatch) -> Tensor:
        """The states that the learnt tokens are predicted from, with gradient: `[targets, hidden]`."""
        return states_before_targets(self.model, m)

    def outputs(self, m: MicroBatch, entropy: bool = False) -> PolicyOutput:
        """Everything that one forward pass gives; entropies only if asked for."""

        def compute(model: torch.nn.Module) -> PolicyOutput:
            if self._context is not None:
                both = self._context.logprobs(model, m, self.temperature, self.chunk, entropy, self._token_logprobs)
                return PolicyOutput(*both, hidden=both[0].new_zeros(0))
            hidden = self.hidden(m)
            head = partial(logits, model)
            logprobs, entropies = self._token_logprobs(head, hidden, m.targets, self.temperature, self.chunk, entropy)
            return PolicyOutput(logprobs, entropies, hidden)

        if self._around is None:
            return compute(self.model)
        output: PolicyOutput = self._around(compute)
        return output

    def logprobs(self, m: MicroBatch, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """`outputs` without the hidden states."""
        output = self.outputs(m, entropy)
        return output.logprobs, output.entropies


def states_before_targets(model: torch.nn.Module, m: MicroBatch) -> Tensor:
    """`m` through the layers of `model`; the rows `[targets, hidden]` that its learnt tokens are predicted from."""
    return hidden_states(model, m.input_ids, m.position_ids, PackedAttention(m.lengths)).index_select(0, m.rows)


def checkpoint_layers(model: torch.nn.Module) -> None:
    """transformers recomputes layers only in training mode; nothing else may change with it, so dropout goes to 0."""
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
