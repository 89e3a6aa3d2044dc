"""The clipped value loss: values by hand, gradients, masks, metrics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleuve.algorithms.values import ValueSums, value_loss

NAN, INF = math.nan, math.inf


def _loss(
    values: list[float],
    old: list[float],
    returns: list[float],
    mask: list[bool] | None = None,
    clip: float | None = 0.2,
    denominator: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[float, list[float], ValueSums]:
    v = torch.tensor(values, dtype=dtype, requires_grad=True)
    learnt = torch.tensor([True] * len(values) if mask is None else mask)
    loss, sums = value_loss(
        v,
        torch.tensor(old, dtype=dtype),
        torch.tensor(returns, dtype=dtype),
        learnt,
        denominator=denominator,
        clip=clip,
    )
    loss.backward()
    assert v.grad is not None
    return loss.item(), v.grad.tolist(), sums


def test_without_a_clip_it_is_half_the_squared_error_over_the_denominator() -> None:
    loss, gradient, _ = _loss([0.5, -1.0], [9.0, 9.0], [1.0, 1.0], clip=None, denominator=4)
    assert loss == pytest.approx((0.5 * 0.25 + 0.5 * 4.0) / 4)
    assert gradient == pytest.approx([-0.5 / 4, -2.0 / 4])


@pytest.mark.parametrize(
    ("value", "expected", "gradient"),
    [
        (0.0, 0.5, -1.0),  # not moved: plain
        (0.2, 0.5 * 0.8**2, -0.8),  # on the bound: still plain
        (0.5, 0.5 * 0.8**2, 0.0),  # moved past it towards the return: no gradient
        (-0.5, 0.5 * 1.5**2, -1.5),  # moved away by more: comes back
        (1.9, 0.5 * 0.9**2, 0.9),  # overshot so far that the plain error is the larger
    ],
)
def test_the_larger_of_both_errors_counts(value: float, expected: float, gradient: float) -> None:
    loss, gradients, sums = _loss([value], [0.0], [1.0])
    assert loss == pytest.approx(expected)
    assert gradients == pytest.approx([gradient])
    assert sums.clipped.item() == (gradient == 0.0)


def test_a_value_that_did_not_move_has_the_plain_gradient_bit_for_bit() -> None:
    values = torch.linspace(-3, 3, 101).tolist()
    returns = torch.linspace(2, -1, 101).tolist()
    clipped = _loss(values, values, returns, dtype=torch.float32)
    assert clipped[:2] == _loss(values, values, returns, clip=None, dtype=torch.float32)[:2]
    assert clipped[2].clipped.item() == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("clip", [0.2, None])
def test_nothing_of_a_masked_token_comes_through(bad: float, clip: float | None) -> None:
    loss, gradient, sums = _loss([bad, 0.5, 0.0], [bad, 0.4, 0.0], [0.0, 1.0, bad], [False, True, False], clip)
    alone = _loss([0.5], [0.4], [1.0], clip=clip)
    assert loss == alone[0]
    assert gradient == [0.0, alone[1][0], 0.0]
    assert [float(x) for x in sums] == [float(x) for x in alone[2]]


def test_all_tokens_masked_is_a_loss_of_zero_with_a_gradient_of_zero_and_no_metrics() -> None:
    loss, gradient, sums = _loss([1.0], [NAN], [NAN], [False])
    assert (loss, gradient) == (0.0, [0.0])
    assert sums.metrics() == {}


def test_old_values_and_returns_get_no_gradient() -> None:
    old, returns = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    values = torch.zeros(2, requires_grad=True)
    loss, _ = value_loss(values, old, returns, torch.ones(2, dtype=torch.bool), denominator=1.0, clip=0.2)
    loss.backward()
    assert old.grad is None
    assert returns.grad is None


def test_bf16_values_are_computed_in_fp32() -> None:
    """In bf16, 256 values of ½ · 1.015625² would not add up."""
    n, value = 256, 2.015625
    loss, gradient, _ = _loss([value] * n, [value] * n, [1.0] * n, dtype=torch.bfloat16)
    assert loss == pytest.approx(n * 0.5 * 1.015625**2, rel=1e-6)
    assert gradient == [1.015625] * n


def test_metrics_by_hand() -> None:
    """Returns 0, 1, 2 (variance 2/3); errors of the old values 0, 1, 0.5 (variance 1/6)."""
    _, _, sums = _loss([0.0, 0.5, 1.5], [0.0, 0.0, 1.5], [0.0, 1.0, 2.0], denominator=100)
    assert sums.metrics() == pytest.approx(
        {
            "critic/loss": (0.0 + 0.5 * 0.8**2 + 0.5 * 0.25) / 3,
            "critic/clip_fraction": 1 / 3,
            "critic/value_mean": 0.5,
            "critic/explained_variance": 1 - (1 / 6) / (2 / 3),
        }
    )


@pytest.mark.parametrize("constant", [0.0, 0.3, 1e4])
def test_returns_that_do_not_vary_have_no_explained_variance(constant: float) -> None:
    _, _, sums = _loss([0.0] * 7, [0.1] * 7, [constant] * 7, dtype=torch.float32)
    assert "critic/explained_variance" not in sums.metrics()


def test_a_perfect_critic_of_far_away_returns_explains_all() -> None:
    returns = [1e4, 1e4 + 1, 1e4 + 2]
    _, _, sums = _loss(returns, returns, returns, dtype=torch.float32)
    assert sums.metrics()["critic/explained_variance"] == pytest.approx(1.0)


numbers = st.floats(-3, 3)


@given(tokens=st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), min_size=2, max_size=12), cut=st.data())
def test_how_it_is_split_does_not_show(tokens: list[tuple[float, float, float, bool]], cut: st.DataObject) -> None:
    at = cut.draw(st.integers(1, len(tokens) - 1))
    parts = [_loss(*(list(x) for x in zip(*part, strict=True))) for part in (tokens, tokens[:at], tokens[at:])]  # type: ignore[arg-type]
    (loss, gradient, sums), (loss_a, gradient_a, sums_a), (loss_b, gradient_b, sums_b) = parts
    assert loss == pytest.approx(loss_a + loss_b, abs=1e-12)
    assert gradient == [*gradient_a, *gradient_b]
    assert [float(x) for x in sums] == pytest.approx([float(x) for x in sums_a + sums_b], abs=1e-9)


@given(value=numbers, old=numbers, target=numbers)
def test_the_clip_never_lowers_the_loss(value: float, old: float, target: float) -> None:
    assert _loss([value], [old], [target])[0] >= _loss([value], [old], [target], clip=None)[0] - 1e-12
