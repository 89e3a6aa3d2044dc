"""Context parallelism: one packed micro-batch on several ranks, each with a part of its tokens.

Everything but attention looks at one token at a time, so each rank computes it for its own part. For attention the
ranks exchange: instead of all heads of its own tokens, each gets some heads of all tokens, attends as ever, and sends
the result back (Jacobs et al. 2023, DeepSpeed-Ulysses). Sequences may lie across parts in any way. A rank's activations
are those of its part, so that a sequence can be as many times longer as there are ranks.

What comes out, one number a token, is brought together again, so that a loss sees whole answers. On each rank only its
own tokens carry gradient; gradients of weights are added up over ranks anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fleuve.errors import UserError
from fleuve.modeling.forward import hidden_states, logits
from fleuve.train.attention import PackedAttention
from fleuve.train.logprobs import TokenLogprobs
from fleuve.train.microbatch import MicroBatch
from fleuve.train.rows import whole_of


@dataclass(frozen=True)
class Context:
    """The ranks that share a micro-batch: this one is number `rank` of `count`."""

    group: dist.ProcessGroup
    rank: int
    count: int

    def check(self, model: torch.nn.Module) -> None:
        """
        Raises:
            UserError: the model's heads cannot be shared out.
        """
        heads = int(model.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
        if heads % self.count:
            raise UserError(
                f"trainer.context_parallel = {self.count}: the model has {heads} attention heads, which that does not "
                "divide"
            )

    def logprobs(
        self,
        model: torch.nn.Module,
        m: MicroBatch,
        temperature: float,
        chunk: int,
        entropy: bool,
        token_logprobs: TokenLogprobs,
    ) -> tuple[Tensor, Tensor | None]:
        """`[targets]` each: log-probabilities and, if asked for, entropies; of all targets, those whose rows are this
        rank's with gradient. By all ranks of the context together, each with the same `m`."""
        missing = -len(m.input_ids) % self.count
        lengths = [*m.lengths, missing] if missing else m.lengths
        part = (len(m.input_ids) + missing) // self.count
        first, last = self.rank * part, (self.rank + 1) * part
        ids, positions = (pad(x, (0, missing))[first:last] for x in (m.input_ids, m.position_ids))
        attention = ContextAttention(lengths, self)
        hidden = hidden_states(model, ids, positions, attention)
        edges = torch.arange(self.count + 1, device=m.rows.device) * part
        ends = torch.searchsorted(m.rows, edges).tolist()  # rows ascend: each rank's targets lie together
        own = slice(ends[self.rank], ends[self.rank + 1])
        hidden = hidden.index_select(0, m.rows[own] - first)
        head = partial(logits, model)
        logprobs, entropies = token_logprobs(head, hidden, m.targets[own], temperature, chunk, entropy)
        whole = partial(whole_of, ends=ends, rank=self.rank, group=self.group)
        return whole(logprobs), None if entropies is None else whole(entropies)


class ContextAttention:
    """`PackedAttention` over tokens that lie on several ranks; `lengths` are of all sequences, in order."""

    def __init__(self, lengths: list[int], context: Context) -> None:
        self._packed = PackedAttention(lengths)
        self._context = context

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
        """`query` [own tokens, heads, head_dim], `key` and `value` [own tokens, kv_heads, head_dim] to [own tokens,
        heads, head_dim]."""
        if key.shape[1] % self._context.count:  # fewer than ranks: each query head gets a copy of its own
            repeat = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        query, key, value = (_AllTokens.apply(x, self._context) for x in (query, key, value))
        out: Tensor = _OwnTokens.apply(self._packed(layer, query, key, value, scale, window, softcap), self._context)
        return out


def _all_tokens(x: Tensor, context: Context) -> Tensor:
    """[own tokens, heads, dim] to [all tokens, own heads, dim]."""
    tokens, heads, dim = x.shape
    sent = x.reshape(tokens, context.count, heads // context.count, dim).transpose(0, 1).contiguous()
    return _exchanged(sent, context).reshape(context.count * tokens, heads // context.count, dim)


def _own_tokens(x: Tensor, context: Context) -> Tensor:
    """The way back: [all tokens, own heads, dim] to [own tokens, heads, dim]."""
    tokens, heads, dim = x.shape
    received = _exchanged(x.reshape(context.count, tokens // context.count, heads, dim).contiguous(), context)
    return received.transpose(0, 1).reshape(tokens // context.count, context.count * heads, dim)


def _exchanged(sent: Tensor, context: Context) -> Tensor:
    """`sent[i]` goes to rank i; what comes from rank i is at i."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=context.group)
    return received


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return _all_tokens(x, context)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _own_tokens(grads[0], ctx.context), None


class _OwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return _own_tokens(x, context)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_tokens(grads[0], ctx.context), None
