"""The sampler against distributions small enough to enumerate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fleuve.engine.sampler import BLOCK, Draw, sample, uniforms
from fleuve.types import SamplingParams

LOGITS = [2.0, 1.0, 0.0, -1.0, 0.5]


def expected(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The distribution by its definition, in plain Python: temperature, then top-k, then top-p, renormalised."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    kept = order[: top_k or len(order)]
    total = sum(weights[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


def draw(logits: list[float], count: int, **params: float) -> tuple[list[int], list[float]]:
    """`count` samples of one distribution, a seed each."""
    draws = [Draw(SamplingParams(max_new_tokens=1, seed=s, **params), index=0) for s in range(count)]
    return sample(torch.tensor(logits).repeat(count, 1), draws)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 0, 1.0),
        (1.0, 3, 1.0),
        (1.0, 0, 0.8),
        (0.7, 3, 0.8),
        (3.0, 4, 0.6),
        (1, 1, 1),
    ],
)
def test_tokens_and_logprobs_are_of_the_distribution_sampled_from(temperature, top_k, top_p) -> None:
    want = expected(LOGITS, temperature, top_k, top_p)
    tokens, logprobs = draw(LOGITS, 20_000, temperature=temperature, top_k=top_k, top_p=top_p)
    for token, logprob in set(zip(tokens, logprobs, strict=True)):
        assert logprob == pytest.approx(math.log(want[token]), abs=1e-5)
    for token, p in enumerate(want):
        assert tokens.count(token) / len(tokens) == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / len(tokens)))


def test_a_large_vocabulary_is_sampled_like_a_small_one() -> None:
    vocabulary = 5 * BLOCK + 17
    torch.manual_seed(0)
    logits = torch.randn(vocabulary) * 2
    draws = [Draw(SamplingParams(max_new_tokens=1, seed=s), 0) for s in range(2000)]
    tokens, logprobs = sample(logits.repeat(2000, 1), draws)
    reference = logits.double().log_softmax(-1)
    assert logprobs == pytest.approx(reference[tokens].tolist(), abs=1e-5)
    u = uniforms(np.arange(2000, dtype=np.uint64), np.zeros(2000, dtype=np.uint64)).astype(np.float64)
    cumulative = reference.exp().cumsum(-1)
    below = torch.where(torch.tensor(tokens) > 0, cumulative[torch.tensor(tokens) - 1], 0.0).numpy()
    assert (below - 1e-5 <= u).all()
    assert (u <= cumulative[tokens].numpy() + 1e-5).all()


def test_only_possible_tokens_are_sampled_at_the_edges() -> None:
    for vocabulary in (5, 3 * BLOCK):
        logits = torch.full((1000, vocabulary), -torch.inf)
        logits[:, 3] = 0.0
        tokens, logprobs = sample(logits, [Draw(SamplingParams(max_new_tokens=1, seed=s), 0) for s in range(1000)])
        assert set(tokens) == {3}
        assert set(logprobs) == {0.0}


def test_greedy_takes_the_best_with_logprob_zero_beside_sampled_rows() -> None:
    params = [SamplingParams(max_new_tokens=1, temperature=t, seed=5) for t in (0.0, 1.0, 0.0)]
    tokens, logprobs = sample(torch.tensor([LOGITS] * 3), [Draw(p, 0) for p in params])
    assert (tokens[0], tokens[2]) == (0, 0)
    assert (logprobs[0], logprobs[2]) == (0.0, 0.0)
    assert logprobs[1] < 0


def test_a_row_is_sampled_alike_whatever_is_beside_it() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 40)
    mixed = [
        SamplingParams(max_new_tokens=9, seed=i, temperature=t, top_k=k, top_p=p)
        for i, (t, k, p) in enumerate([(1, 0, 1), (0.6, 0, 1), (1, 5, 1), (1, 0, 0.5), (0, 0, 1), (1.3, 9, 0.9)])
    ]
    together = sample(logits, [Draw(p, 4) for p in mixed])
    for i, p in enumerate(mixed):
        tokens, logprobs = sample(logits[i : i + 1], [Draw(p, 4)])
        assert tokens == together[0][i : i + 1]
        assert logprobs == pytest.approx(together[1][i : i + 1], abs=1e-6)


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    seeds, indices = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    u = uniforms(seeds.ravel(), indices.ravel())
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    counts, _ = np.histogram(u, bins=50, range=(0, 1))
    assert (np.abs(counts - 800) < 5 * math.sqrt(800)).all()
    grid = u.reshape(200, 200)
    assert abs(np.corrcoef(grid[0], grid[1])[0, 1]) < 0.3
    assert len(np.unique(u)) > 39_000


def test_logits_that_are_not_numbers_are_reported_not_sampled() -> None:
    logits = torch.tensor([LOGITS, [math.nan] * 5])
    _, logprobs = sample(logits, [Draw(SamplingParams(max_new_tokens=1), 0)] * 2)
    assert not math.isnan(logprobs[0])
    assert math.isnan(logprobs[1])
