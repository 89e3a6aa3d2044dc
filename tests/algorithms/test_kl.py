"""The divergence from the reference: estimators as values, and the one gradient that is right.

Expectations are exact: the sum over all tokens of a small softmax, each with its probability of being sampled.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fleuve.algorithms.kl import ESTIMATORS, Estimator, k1, k2, k3, kl_penalty

VOCABULARY = 7
estimators = pytest.mark.parametrize("estimator", list(ESTIMATORS))


def _policy(seed: int, spread: float = 1.0) -> Tensor:
    """Logits of a distribution over the vocabulary."""
    return spread * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _log(logits: Tensor) -> Tensor:
    return logits.log_softmax(0)


def _divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(softmax(logits) ‖ softmax(reference)) by its definition."""
    return (_log(logits).exp() * (_log(logits) - _log(reference))).sum()


def _gradient(of: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    of(logits).backward()
    assert logits.grad is not None
    return logits.grad


def _expected(per_token: Callable[[Tensor], Tensor], sampler: Tensor) -> Callable[[Tensor], Tensor]:
    """The loss whose expectation over tokens drawn from `sampler` training follows: who samples carries no gradient."""
    probability = _log(sampler).exp().detach()
    return lambda logits: (probability * per_token(_log(logits))).sum()


THETA, REFERENCE, OLDER = _policy(0), _policy(1), _policy(2)
TRUE_GRADIENT = _gradient(lambda x: _divergence(x, REFERENCE), THETA)


def test_k1_and_k3_are_unbiased_and_k2_is_near() -> None:
    p, reference = _log(THETA).exp(), _log(REFERENCE)
    divergence = _divergence(THETA, REFERENCE).item()
    assert (p * k1(_log(THETA), reference)).sum().item() == pytest.approx(divergence, abs=1e-12)
    assert (p * k3(_log(THETA), reference)).sum().item() == pytest.approx(divergence, abs=1e-12)
    close = _log(THETA + 0.01 * OLDER)
    near = (close.exp() * k2(close, _log(THETA))).sum().item()
    assert near == pytest.approx(_divergence(THETA + 0.01 * OLDER, THETA).item(), rel=0.05)
    assert (p * k2(_log(THETA), reference)).sum().item() != pytest.approx(divergence, rel=0.05)


def test_k1_as_a_loss_has_no_expected_gradient() -> None:
    """Which is why it cannot be a penalty: only its noise would be felt."""
    gradient = _gradient(_expected(lambda lp: k1(lp, _log(REFERENCE)), THETA), THETA)
    assert gradient.abs().max().item() < 1e-12


def test_k3_as_a_loss_has_the_gradient_of_the_other_divergence() -> None:
    gradient = _gradient(_expected(lambda lp: k3(lp, _log(REFERENCE)), THETA), THETA)
    assert not torch.allclose(gradient, TRUE_GRADIENT, rtol=0.1)
    reverse = _gradient(lambda x: _divergence(REFERENCE, x), THETA)
    assert torch.allclose(gradient, reverse, atol=1e-12)


@estimators
def test_the_penalty_has_the_right_gradient_on_policy(estimator: Estimator) -> None:
    ones = torch.ones(VOCABULARY, dtype=torch.float64)
    loss = _expected(lambda lp: kl_penalty(lp, _log(REFERENCE), ones, estimator), THETA)
    assert torch.allclose(_gradient(loss, THETA), TRUE_GRADIENT, atol=1e-12)
    expected = (_log(THETA).exp() * ESTIMATORS[estimator](_log(THETA), _log(REFERENCE))).sum()
    assert loss(THETA).item() == pytest.approx(expected.item(), abs=1e-12)


@estimators
def test_the_penalty_has_the_right_gradient_for_tokens_of_an_older_policy(estimator: Estimator) -> None:
    """With π_θ / π_behav as weight, which depends on θ but carries no gradient; without it the gradient is off."""

    def weighted(lp: Tensor) -> Tensor:
        return kl_penalty(lp, _log(REFERENCE), (lp - _log(OLDER)).exp(), estimator)

    def unweighted(lp: Tensor) -> Tensor:
        return kl_penalty(lp, _log(REFERENCE), torch.ones_like(lp), estimator)

    loss = _expected(weighted, OLDER)
    assert torch.allclose(_gradient(loss, THETA), TRUE_GRADIENT, atol=1e-12)
    assert not torch.allclose(_gradient(_expected(unweighted, OLDER), THETA), TRUE_GRADIENT, rtol=0.1)
    if estimator != "k2":
        assert loss(THETA).item() == pytest.approx(_divergence(THETA, REFERENCE).item(), abs=1e-12)


def test_following_the_penalty_leads_to_the_reference() -> None:
    logits = THETA.clone()
    for _ in range(300):
        ones = torch.ones_like(logits)
        logits = logits - _gradient(_expected(lambda lp, w=ones: kl_penalty(lp, _log(REFERENCE), w), logits), logits)
    assert _divergence(logits, REFERENCE).item() < 1e-6


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_and_k3_are_never_negative_and_all_are_zero_at_the_reference(current: float, reference: float) -> None:
    a, b = torch.tensor([current]), torch.tensor([reference])
    assert k2(a, b).item() >= 0.0
    assert k3(a, b).item() >= -1e-6
    assert [k(a, a).item() for k in ESTIMATORS.values()] == [0.0, 0.0, 0.0]


@estimators
@pytest.mark.parametrize("d", [100.0, -100.0, math.inf, -math.inf])
def test_a_log_ratio_of_a_hundred_is_finite_in_value_and_gradient(estimator: Estimator, d: float) -> None:
    bound = math.copysign(20.0, d)
    values = {"k1": bound, "k2": 200.0, "k3": math.exp(-bound) - 1 + bound}
    logprobs = torch.tensor([-1.0], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([-1.0 - d]), torch.ones(1), estimator)
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(values[estimator], rel=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == bound


@estimators
def test_a_token_that_has_become_impossible_gives_neither_nan_nor_gradient(estimator: Estimator) -> None:
    logprobs = torch.tensor([-math.inf], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([-1.0]), torch.zeros(1), estimator)
    penalty.sum().backward()
    assert (penalty.item(), logprobs.grad.tolist()) == (0.0, [0.0])


@estimators
def test_half_precision_and_no_tokens(estimator: Estimator) -> None:
    half = torch.tensor([-1.0], dtype=torch.bfloat16)
    penalty = kl_penalty(
        half, torch.tensor([-1.0625], dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16), estimator
    )
    assert penalty.dtype == torch.float32
    assert penalty.item() == pytest.approx(
        {"k1": 0.0625, "k2": 0.001953125, "k3": math.exp(-0.0625) - 0.9375}[estimator]
    )
    empty = torch.zeros(0, requires_grad=True)
    kl_penalty(empty, torch.zeros(0), torch.zeros(0), estimator).sum().backward()
