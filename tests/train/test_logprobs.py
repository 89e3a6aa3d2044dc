"""Chunked log-probabilities are the plain ones, and `[tokens, vocabulary]` never exists at once."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("used", ["entropy", "both"])
def test_the_entropy_has_the_plain_gradient(chunk: int, temperature: float, softcap: float | None, used: str) -> None:
    linear, hidden, targets = _inputs()

    def head(h: torch.Tensor) -> torch.Tensor:
        out = linear(h)
        return out if softcap is None else torch.tanh(out / softcap) * softcap

    a, b = torch.randn(2, TOKENS, dtype=torch.float64)
    if used == "entropy":
        b = torch.zeros_like(b)
    plain = (head(hidden) / temperature).log_softmax(-1)
    loss = (-(plain.exp() * plain).sum(-1) * a).sum() + (plain[torch.arange(TOKENS), targets] * b).sum()
    wanted = [hidden, linear.weight, linear.bias]
    expected = torch.autograd.grad(loss, wanted)

    logprobs, entropy = token_logprobs(head, hidden, targets, temperature, chunk, entropy=True)
    ((entropy * a).sum() + ((logprobs * b).sum() if used == "both" else 0.0)).backward()
    for tensor, gradient in zip(wanted, expected, strict=True):
        assert torch.allclose(tensor.grad, gradient, atol=1e-12)


def test_the_entropy_s_gradient_is_that_of_finite_differences() -> None:
    linear, hidden, targets = _inputs()
    linear.requires_grad_(False)
    assert torch.autograd.gradcheck(
        lambda h: token_logprobs(linear, h, targets[:5], 0.7, 2, entropy=True), (hidden[:5].detach().requires_grad_(),)
    )


class _CountsOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_entropies_that_nobody_uses_change_no_bit_of_the_gradient_and_cost_nothing_there() -> None:
    linear, hidden, targets = _inputs()
    gradients, counts = [], []
    for entropy in (False, True):
        logprobs, _ = token_logprobs(linear, hidden, targets, 0.6, 5, entropy=entropy)
        with _CountsOperations() as operations:
            gradients.append(torch.autograd.grad(logprobs.sum(), hidden)[0])
        counts.append(operations.count)
    assert torch.equal(*gradients)
    assert counts[0] <= counts[1] <= counts[0] + 1  # the saved entropies are unpacked, once: nothing a chunk


def test_an_almost_certain_token_has_a_finite_entropy_gradient_in_bf16() -> None:
    """Probabilities underflow to 0, log-probabilities stay finite."""
    head = torch.nn.Linear(HIDDEN, WORDS, dtype=torch.bfloat16)
    torch.nn.init.eye_(head.weight)
    hidden = torch.full((1, HIDDEN), -500.0, dtype=torch.bfloat16)
    hidden[0, 2] = 500.0
    hidden.requires_grad_()
    logprobs, entropy = token_logprobs(head, hidden, torch.tensor([2]), 1.0, 4, entropy=True)
    (logprobs + entropy).sum().backward()
    assert entropy.detach().item() == pytest.approx(0.0, abs=1e-6)
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize("entropy", [False, True])
def test_no_more_than_a_chunk_of_logits_exists_at_once(entropy: bool) -> None:
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

    logprobs, entropies = token_logprobs(head, hidden, targets, 1.0, chunk=4, entropy=entropy)
    assert sum(alive) <= 4
    (logprobs if entropies is None else logprobs + entropies).sum().backward()
    assert max(peaks) <= 8
    assert len(peaks) == 2 * 6  # forward, and again backward


def test_without_entropy_none_is_computed() -> None:
    linear, hidden, targets = _inputs()
    assert token_logprobs(linear, hidden, targets, 1.0, chunk=4)[1] is None
