"""What the importance weight of a token is, who is kept, and that no weight is ever infinite."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleuve.algorithms.answers import Answers
from fleuve.algorithms.corrections import (
    Correction,
    clamp,
    mask,
    none,
    second_moment,
    second_moment_limit,
)


def _log(weights: list[float]) -> torch.Tensor:
    return torch.tensor([math.log(w) for w in weights], dtype=torch.float64)


def _check(correction: Correction, weight: list[float], kept: list[bool]) -> None:
    assert correction.weight.tolist() == pytest.approx(weight)
    assert correction.kept.tolist() == kept


WEIGHTS = _log([0.25, 1.0, 4.0, 8.0])
ONE_EACH = Answers.of([1, 1, 1, 1])
PAIRS = Answers.of([2, 2])


def test_none_applies_the_weight_as_it_is() -> None:
    _check(none(WEIGHTS, ONE_EACH), [0.25, 1.0, 4.0, 8.0], [True] * 4)


def test_clamp_truncates_and_keeps_everything() -> None:
    _check(clamp(WEIGHTS, ONE_EACH, upper=5.0), [0.25, 1.0, 4.0, 5.0], [True] * 4)
    _check(clamp(WEIGHTS, ONE_EACH, lower=0.5, upper=2.0), [0.5, 1.0, 2.0, 2.0], [True] * 4)


def test_mask_drops_what_lies_outside_its_bounds_and_leaves_the_rest_alone() -> None:
    _check(mask(WEIGHTS, ONE_EACH, upper=5.0), [0.25, 1.0, 4.0, 8.0], [True, True, True, False])
    _check(mask(WEIGHTS, ONE_EACH, lower=0.5, upper=5.0), [0.25, 1.0, 4.0, 8.0], [False, True, True, False])


def test_a_weight_at_the_bound_is_kept() -> None:
    assert mask(torch.zeros(1), Answers.of([1]), lower=1.0, upper=1.0).kept.tolist() == [True]


def test_at_sequence_level_an_answer_has_the_geometric_mean_and_is_kept_or_dropped_whole() -> None:
    """√(1/4 · 1) = 1/2 and √(4 · 8) ≈ 5.66: also what is *applied* to every token of the answer."""
    means = [0.5, 0.5, math.sqrt(32), math.sqrt(32)]
    _check(none(WEIGHTS, PAIRS, level="sequence"), means, [True] * 4)
    _check(clamp(WEIGHTS, PAIRS, upper=5.0, level="sequence"), [0.5, 0.5, 5.0, 5.0], [True] * 4)
    _check(mask(WEIGHTS, PAIRS, upper=5.0, level="sequence"), means, [True, True, False, False])
    _check(mask(WEIGHTS, PAIRS, lower=0.6, upper=9.0, level="sequence"), means, [False, False, True, True])


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8))
def test_for_answers_of_one_token_both_levels_are_the_same(log_weights: list[float]) -> None:
    x, answers = torch.tensor(log_weights, dtype=torch.float64), Answers.of([1] * len(log_weights))
    for correct in (
        none,
        lambda *a, **k: mask(*a, lower=0.5, upper=2.0, **k),
        lambda *a, **k: clamp(*a, upper=2.0, **k),
    ):
        token, sequence = correct(x, answers, level="token"), correct(x, answers, level="sequence")
        assert torch.allclose(token.weight, sequence.weight)
        assert token.kept.equal(sequence.kept)


def test_an_answer_that_is_repeated_does_not_change_the_others() -> None:
    alone = mask(WEIGHTS, PAIRS, upper=5.0, level="sequence")
    beside = mask(torch.cat([WEIGHTS, WEIGHTS]), Answers.of([2, 2, 4]), upper=5.0, level="sequence")
    assert beside.weight[:4].equal(alone.weight)
    assert beside.kept[:4].equal(alone.kept)


def _brute_force_kept(sizes: list[float], budget: float) -> list[float]:
    """Mask the largest, with whatever ties with it, until the mean of squares of the rest is within the budget."""
    kept = sorted(sizes)
    while kept and sum(x * x for x in kept) / len(kept) > budget:
        kept = [x for x in kept if x < kept[-1]]
    return kept


# Multiples of 1/16 have exact squares, so that ties and budgets are met exactly.
sixteenths = st.lists(st.integers(-40, 40).map(lambda n: n / 16), max_size=12)


@given(sixteenths, st.sampled_from([0.0, 0.015625, 0.04, 0.5, 100.0]))
def test_the_second_moment_of_what_is_kept_is_within_the_budget_and_as_much_as_possible_is_kept(
    log_weights: list[float], budget: float
) -> None:
    x = torch.tensor(log_weights, dtype=torch.float32)
    limit = second_moment_limit(x, budget)
    correction = second_moment(x, limit)
    kept = sorted(abs(v) for v, k in zip(log_weights, correction.kept.tolist(), strict=True) if k)
    assert kept == _brute_force_kept([abs(v) for v in log_weights], budget)
    assert correction.weight.tolist() == pytest.approx([math.exp(v) for v in log_weights], rel=1e-5)


@pytest.mark.parametrize(
    ("log_weights", "budget", "limit"),
    [
        ([0.0, -0.5], 0.125, 0.5),  # exactly the budget is within it
        ([0.0, 0.5, -0.5], 0.15, 0.0),  # one of the two would fit: both go
        ([0.25, 0.5, -0.5, 1.0], 0.1875, 0.5),  # mean of 1/16, 1/4, 1/4
        ([1.0, 1.0], 0.04, 0.0),  # nothing fits
    ],
)
def test_the_limit_of_a_worked_example(log_weights: list[float], budget: float, limit: float) -> None:
    assert second_moment_limit(torch.tensor(log_weights), budget) == limit


def test_the_limit_of_a_minibatch_masks_the_same_tokens_in_any_micro_batches() -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(0)) * 0.4
    limit = second_moment_limit(x, 0.04)
    whole = second_moment(x, limit).kept
    assert torch.cat([second_moment(part, limit).kept for part in x.split(37)]).equal(whole)
    assert 0 < int(whole.sum()) < 200
    assert float(x[whole].square().mean()) <= 0.04


@pytest.mark.parametrize("extreme", [100.0, -100.0, math.inf, -math.inf])
def test_a_log_weight_of_a_hundred_is_a_finite_weight(extreme: float) -> None:
    x, answers = torch.tensor([extreme, 0.0]), Answers.of([1, 1])
    expected = math.exp(math.copysign(20.0, extreme))
    assert none(x, answers).weight.tolist() == pytest.approx([expected, 1.0], rel=1e-5)
    assert clamp(x, answers, lower=0.1, upper=5.0).weight.tolist() == pytest.approx([5.0 if extreme > 0 else 0.1, 1.0])
    assert mask(x, answers, lower=0.1, upper=5.0).kept.tolist() == [False, True]
    pair = mask(x, Answers.of([2]), lower=0.1, upper=5.0, level="sequence")
    assert pair.weight.tolist() == pytest.approx([math.exp(math.copysign(10.0, extreme))] * 2, rel=1e-5)
    assert pair.kept.tolist() == [False, False]
    assert second_moment_limit(x, 0.04) == 0.0
    assert second_moment(x, 0.0).kept.tolist() == [False, True]


def test_a_weight_that_is_no_number_is_not_kept_by_a_mask() -> None:
    assert mask(torch.tensor([math.nan]), Answers.of([1]), upper=5.0).kept.tolist() == [False]
    assert second_moment(torch.tensor([math.nan]), 1.0).kept.tolist() == [False]


def test_no_gradient_goes_through_a_weight() -> None:
    x = torch.zeros(2, requires_grad=True)
    answers = Answers.of([2])
    corrections = [none(x, answers), clamp(x, answers, upper=2.0), mask(x, answers, upper=2.0, level="sequence")]
    assert not any(c.weight.requires_grad for c in [*corrections, second_moment(x, 1.0)])


def test_half_precision_is_worked_in_float32() -> None:
    x = torch.tensor([1 / 128], dtype=torch.bfloat16)
    for correction in (none(x, Answers.of([1])), none(x, Answers.of([1]), level="sequence"), second_moment(x, 1.0)):
        assert correction.weight.dtype == torch.float32
        assert correction.weight.item() == pytest.approx(math.exp(1 / 128), rel=1e-6)


def test_no_tokens_give_no_weights() -> None:
    x, answers = torch.zeros(0), Answers.of([])
    for correction in (none(x, answers), clamp(x, answers, upper=2.0, level="sequence"), second_moment(x, 1.0)):
        assert (correction.weight.tolist(), correction.kept.tolist()) == ([], [])
    assert second_moment_limit(x) == 0.0
