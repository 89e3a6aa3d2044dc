"""Log-probabilities of given tokens, a chunk of tokens at a time: `[tokens, vocabulary]` never exists at once.

A vocabulary of 150,000 makes the logits of one packed micro-batch of 8,192 tokens 5 GB in fp32, several times over in
the backward pass. Here the forward pass keeps one number a token beside the result, and the backward pass computes each
chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Head = Callable[[Tensor], Tensor]
"""Hidden states `[tokens, hidden]` to logits `[tokens, vocabulary]`."""

TokenLogprobs = Callable[[Head, Tensor, Tensor, float, int, bool], tuple[Tensor, Tensor | None]]
"""`token_logprobs`, or the same by several ranks together."""


def token_logprobs(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(head(hidden) / temperature) at `targets`, in fp32 or better, with gradient.

    The gradient reaches `hidden` through autograd; parameters inside `head` get theirs added to `.grad` during the
    backward pass, chunk by chunk: where that is to be more precise than they are, see `torch.Tensor.grad_dtype`.

    Args:
        head: the output layer.
        hidden: `[tokens, hidden]`.
        targets: `[tokens]`, int64.
        temperature: divides the logits, as it did when the tokens were sampled.
        chunk: the most tokens whose logits exist at once.
        entropy: compute each distribution's entropy too (nats); its gradient costs nothing unless it is used.

    Returns:
        The log-probabilities `[tokens]`, and the entropies `[tokens]` or None.
    """
    logprobs, entropies = _ChunkedLogprobs.apply(head, hidden, targets, temperature, chunk, entropy)
    return logprobs, entropies


def _scores(logits: Tensor, temperature: float) -> Tensor:
    scores = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return scores if temperature == 1.0 else scores / temperature


class _ChunkedLogprobs(torch.autograd.Function):
    """From each chunk's recomputed logits, with p = softmax(scores):

    d logprob / d scores_j = [j = target] − p_j,    d entropy / d scores_j = − p_j (log p_j + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, head: Head, hidden: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, normalisers, entropies = [], [], []
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            scores = _scores(head(h), temperature)
            normaliser = scores.logsumexp(-1)
            normalisers.append(normaliser)
            logprobs.append(scores.gather(-1, t[:, None])[:, 0] - normaliser)
            if entropy:
                probabilities = (scores - normaliser[:, None]).exp_()
                entropies.append(normaliser - torch.linalg.vecdot(probabilities, scores))
        ctx.head, ctx.temperature, ctx.chunk = head, temperature, chunk
        ctx.set_materialize_grads(False)  # an output that nobody used has the gradient None, not zeros
        all_entropies = torch.cat(entropies) if entropy else None
        ctx.save_for_backward(hidden, targets, torch.cat(normalisers), all_entropies)
        return torch.cat(logprobs), all_entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, targets, normalisers, entropies = ctx.saved_tensors
        logprob_grad, entropy_grad = grads
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(normalisers)
        hidden_grad = torch.empty_like(hidden)
        for start in range(0, max(len(targets), 1), ctx.chunk):  # of no tokens too, `head` has a gradient
            part = slice(start, start + ctx.chunk)
            grad = logprob_grad[part, None]
            h = hidden[part].detach().requires_grad_()
            with torch.enable_grad():
                logits = ctx.head(h)
            # Not in place from the start: a head may need its own output again (tanh of a soft cap does).
            d = _scores(logits.detach(), ctx.temperature) - normalisers[part, None]
            if entropy_grad is None:
                d.exp_().mul_(-grad)
            else:
                factor = (d + entropies[part, None]).mul_(entropy_grad[part, None]).add_(grad)
                d.exp_().mul_(factor.neg_())
            d.scatter_add_(-1, targets[part, None], grad)
            if ctx.temperature != 1.0:
                d /= ctx.temperature
            torch.autograd.backward(logits, d.to(logits.dtype))
            hidden_grad[part] = h.grad
        return None, hidden_grad, None, None, None, None
