"""From logits to tokens and their log-probabilities, for a whole step at once.

A token is drawn by inverting the cumulative distribution at a uniform number that is a pure function of the request's
seed and the token's place in the answer, so what else is in the batch cannot matter. The log-probability is that of
the distribution drawn from: after temperature, then top-k, then top-p, renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleuve.types import SamplingParams

MAX_TEMPERATURE_INVERSE = 1e4  # below a temperature of 1e-4 the division overflows bf16-born logits for no use
BLOCK = 256


@dataclass(frozen=True, slots=True)
class Draw:
    """What is needed to sample one row: its request's parameters, and how many answer tokens it has already."""

    params: SamplingParams
    index: int


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Numbers in [0, 1 − 2⁻²²], one for each (seed, index): two rounds of the splitmix64 finaliser.

    Short of 1 by enough that its product with a float32 total rounds below that total.
    """
    with np.errstate(over="ignore"):
        x = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        x = _mix(x + (indices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    unit: NDArray[np.float32] = (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return unit.clip(max=np.float32(1 - 2.0**-22))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014), variant 13 of Stafford."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: Tensor, draws: Seq[Draw]) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities [rows] from `logits` [rows, vocabulary].

    Greedy rows (temperature 0) have log-probability 0. A row whose logits are not finite has NaN.
    """
    device = logits.device
    params = [d.params for d in draws]
    temperatures = [p.temperature for p in params]
    greedy = [t == 0 for t in temperatures]
    if all(greedy):
        best = logits.max(-1)
        return best.indices.tolist(), (best.values * 0.0).tolist()

    if any(t != 1 for t in temperatures):
        inverse = [1.0 if t == 0 else min(1.0 / t, MAX_TEMPERATURE_INVERSE) for t in temperatures]
        if all(t == inverse[0] for t in inverse):
            logits = logits.float() * inverse[0]
        else:
            logits = logits.float() * torch.tensor(inverse, dtype=torch.float32, device=device)[:, None]
    probabilities = logits.softmax(-1, dtype=torch.float32)
    filtered = [i for i, p in enumerate(params) if not greedy[i] and (p.top_k > 0 or p.top_p < 1)]
    if filtered:
        rows = torch.tensor(filtered, device=device)
        chosen = [params[i] for i in filtered]
        probabilities[rows] = _filter(probabilities[rows], [p.top_k for p in chosen], [p.top_p for p in chosen])

    seeds = np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], dtype=np.uint64)
    uniform = torch.from_numpy(uniforms(seeds, np.array([d.index for d in draws], dtype=np.uint64))).to(device)
    tokens = _invert(probabilities, uniform)
    logprobs = probabilities.gather(1, tokens[:, None])[:, 0].log()
    if any(greedy):
        is_greedy = torch.tensor(greedy, device=device)
        best = logits.max(-1)
        tokens = torch.where(is_greedy, best.indices, tokens)
        logprobs = torch.where(is_greedy, best.values * 0.0, logprobs)
    return tokens.tolist(), logprobs.tolist()


def _filter(probabilities: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
    """Keep of each row the `top_k` likeliest (0: all), of those the fewest that reach `top_p`, and renormalise."""
    device = probabilities.device
    vocabulary = probabilities.shape[-1]
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    k = torch.tensor([min(k, vocabulary) if k > 0 else vocabulary for k in top_k], device=device)[:, None]
    ordered = torch.where(torch.arange(vocabulary, device=device) < k, ordered, 0.0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    nucleus = before < torch.tensor(top_p, dtype=torch.float32, device=device)[:, None]
    ordered = torch.where(nucleus, ordered, 0.0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered)


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds `uniform` × total, [rows].

    In two stages, blocks and then within the block, which is faster and more exact than one long cumulative sum.
    """
    rows, vocabulary = probabilities.shape
    if vocabulary <= 2 * BLOCK:
        return _first_above(probabilities.cumsum(-1), uniform)
    blocks = -(-vocabulary // BLOCK)
    if vocabulary % BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, blocks * BLOCK - vocabulary))
    blocked = probabilities.view(rows, blocks, BLOCK)
    ends = blocked.sum(-1).cumsum(-1)
    block = _first_above(ends, uniform)[:, None]
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)[:, 0]
    inside = blocked.gather(1, block[:, :, None].expand(rows, 1, BLOCK))[:, 0].cumsum(-1)
    target = uniform * ends[:, -1] - start
    # Rounding may leave the target at or above the block's own total: then its last token with any probability.
    last = (inside < inside[:, -1:]).sum(-1)
    token = torch.searchsorted(inside, target[:, None], right=True)[:, 0]
    return block[:, 0] * BLOCK + torch.minimum(token, last)


def _first_above(cumulative: Tensor, uniform: Tensor) -> Tensor:
    target = (uniform * cumulative[:, -1])[:, None]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return found.clamp_(max=cumulative.shape[-1] - 1)
