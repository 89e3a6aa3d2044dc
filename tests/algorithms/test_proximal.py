"""The interpolated proximal policy: exact at its ends, in between by the token's own staleness."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleuve.algorithms.proximal import interpolate

logprobs = st.floats(-50, 0)
CURRENT = torch.tensor([-0.1, -0.3, -7.7])
BEHAVIOUR = torch.tensor([-0.7, -1.1, -0.2])


@given(logprobs, logprobs, st.floats(0, 1))
def test_a_token_of_the_version_the_step_starts_from_is_exactly_its_own_proximal(
    current: float, behaviour: float, progress: float
) -> None:
    theta, mu = torch.tensor([current]), torch.tensor([behaviour])
    assert interpolate(theta, mu, torch.tensor([0]), progress).equal(mu)


@given(logprobs, logprobs, st.integers(1, 10_000))
def test_before_the_first_update_the_current_policy_is_exactly_the_proximal_of_older_tokens(
    current: float, behaviour: float, staleness: int
) -> None:
    theta, mu = torch.tensor([current]), torch.tensor([behaviour])
    assert interpolate(theta, mu, torch.tensor([staleness]), 0.0).equal(theta)


def test_with_progress_one_it_is_as_published() -> None:
    staleness = torch.tensor([0, 1, 3])
    alpha = torch.tensor([0.0, 1 / 2, 3 / 4])
    expected = BEHAVIOUR + alpha * (CURRENT - BEHAVIOUR)
    assert torch.allclose(interpolate(CURRENT, BEHAVIOUR, staleness, 1.0), expected)


@given(st.integers(0, 20), st.sampled_from([0.0, 0.25, 0.5, 0.75]), st.floats(-2, 2), st.floats(-5, 0))
def test_it_is_exact_for_a_policy_that_moves_evenly(
    staleness: int, progress: float, slope: float, start: float
) -> None:
    """log π at version u is start + slope · u: the proximal one is read off the line, whatever the staleness."""
    version = 20
    at = lambda u: torch.tensor([start + slope * u], dtype=torch.float64)  # noqa: E731
    proximal = interpolate(at(version + progress), at(version - staleness), torch.tensor([staleness]), progress)
    assert proximal.item() == pytest.approx(at(version).item(), abs=1e-9)


@given(st.integers(0, 20), st.floats(0, 1), logprobs, logprobs)
def test_it_lies_between_its_ends_and_nearer_to_the_current_policy_the_staler_the_token(
    staleness: int, progress: float, current: float, behaviour: float
) -> None:
    theta, mu = (torch.tensor([x], dtype=torch.float64) for x in (current, behaviour))
    younger, older = (interpolate(theta, mu, torch.tensor([d]), progress).item() for d in (staleness, staleness + 1))
    assert min(current, behaviour) - 1e-9 <= older <= max(current, behaviour) + 1e-9
    assert abs(older - current) <= abs(younger - current) + 1e-9


def test_it_carries_no_gradient() -> None:
    theta = CURRENT.clone().requires_grad_()
    assert not interpolate(theta, BEHAVIOUR, torch.tensor([0, 1, 2]), 0.5).requires_grad


def test_half_precision_and_no_tokens() -> None:
    half = interpolate(CURRENT.bfloat16(), BEHAVIOUR, torch.tensor([0, 1, 2]), 0.5)
    assert half.dtype == torch.float32
    assert torch.allclose(half, interpolate(CURRENT.bfloat16().float(), BEHAVIOUR, torch.tensor([0, 1, 2]), 0.5))
    empty = torch.zeros(0)
    assert interpolate(empty, empty, torch.zeros(0, dtype=torch.int64), 0.0).tolist() == []
