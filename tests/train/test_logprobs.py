"""Chunked log-probabilities are the plain ones, and `[tokens, vocabulary]` never exists at once."""

import weakref

import pytest
import torch

from fleuve.train.logprobs import token_logprobs

TOKENS, HIDDEN, WORDS = 23, 6, 11


def _inputs() -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, WORDS, dtype=torch.float64)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    return head, hidden, torch.randint(WORDS, (TOKENS,))


@pytest.mark.parametrize("chunk", [1, 5, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_values_and_gradients_are_the_plain_ones(chunk: int, temperature: float, softcap: float | None) -> None:
    linear, hidden, targets = _inputs()

    def head(h: torch.Tensor) -> torch.Tensor:
        out = linear(h)
        return out if softcap is None else torch.tanh(out / softcap) * softcap

    plain = (head(hidden) / temperature).log_softmax(-1)
    weight = torch.randn(TOKENS, dtype=torch.float64)
    wanted = [hidden, linear.weight, linear.bias]
    expected = torch.autograd.grad((plain[torch.arange(TOKENS), targets] * weight).sum(), wanted, retain_graph=True)

    ours, entropy = token_logprobs(head, hidden, targets, temperature, chunk, entropy=True)
    (ours * weight).sum().backward()
    assert torch.allclose(ours, plain[torch.arange(TOKENS), targets], atol=1e-12)
    assert torch.allclose(entropy, -(plain.exp() * plain).sum(-1), atol=1e-12)
    for tensor, gradient in zip(wanted, expected, strict=True):
        assert torch.allclose(tensor.grad, gradient, atol=1e-12)


def test_no_more_than_a_chunk_of_logits_exists_at_once() -> None:
    """Two chunks may: the next one is computed before the last one's name is given up."""
    linear, hidden, targets = _inputs()
    alive: list[int] = []
    peaks: list[int] = []

    def head(h: torch.Tensor) -> torch.Tensor:
        out = linear(h)
        alive.append(len(out))
        weakref.finalize(out, alive.remove, len(out))
        peaks.append(sum(alive))
        return out

    logprobs, _ = token_logprobs(head, hidden, targets, 1.0, chunk=4)
    assert sum(alive) <= 4
    logprobs.sum().backward()
    assert max(peaks) <= 8
    assert len(peaks) == 2 * 6  # forward, and again backward


def test_without_entropy_none_is_computed() -> None:
    linear, hidden, targets = _inputs()
    assert token_logprobs(linear, hidden, targets, 1.0, chunk=4)[1] is None
