"""What a token counts: the three means, whatever micro-batches the tokens came in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleuve.algorithms.aggregation import Totals, answer_mean, constant, token_mean
from fleuve.algorithms.answers import Answers

LOSSES = [[1.0, 2.0, 6.0], [5.0], [4.0, 4.0]]
LENGTHS = [len(x) for x in LOSSES]
TOTALS = Totals(tokens=6, answers=3)
FLAT = torch.tensor([x for row in LOSSES for x in row], dtype=torch.float64)


def _aggregate(factor: torch.Tensor) -> float:
    return float((FLAT * factor).sum())


def test_the_three_aggregations_of_a_worked_example() -> None:
    answers = Answers.of(LENGTHS)
    double = {"dtype": torch.float64}
    assert _aggregate(token_mean(answers, TOTALS, **double)) == pytest.approx(22 / 6)
    assert _aggregate(answer_mean(answers, TOTALS, **double)) == pytest.approx((3 + 5 + 4) / 3)
    assert _aggregate(constant(answers, TOTALS, horizon=10, **double)) == pytest.approx((9 + 5 + 8) / 3 / 10)


micro_batches = st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=4)


@given(micro_batches)
def test_splitting_a_minibatch_does_not_change_what_a_token_counts(parts: list[list[int]]) -> None:
    """Empty micro-batches (a rank's dummy) included."""
    lengths = [n for part in parts for n in part]
    totals = Totals(tokens=sum(lengths), answers=sum(n > 0 for n in lengths))
    for aggregate in (token_mean, answer_mean, lambda a, t: constant(a, t, horizon=7)):
        whole = aggregate(Answers.of(lengths), totals)
        assert torch.cat([aggregate(Answers.of(part), totals) for part in parts]).equal(whole)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_the_factors_of_a_mean_sum_to_one(lengths: list[int]) -> None:
    totals = Totals(tokens=sum(lengths), answers=len(lengths))
    for aggregate in (token_mean, answer_mean):
        assert float(aggregate(Answers.of(lengths), totals).sum()) == pytest.approx(1.0, abs=1e-5)


def test_nothing_at_all_counts_nothing() -> None:
    for totals in (Totals(0.0, 0.0), TOTALS):
        for aggregate in (token_mean, answer_mean, lambda a, t: constant(a, t, horizon=7)):
            assert aggregate(Answers.of([]), totals).tolist() == []


def test_factors_have_the_precision_that_was_asked_for() -> None:
    for aggregate in (token_mean, answer_mean):
        assert aggregate(Answers.of([3]), Totals(3.0, 1.0)).dtype == torch.float32
        assert aggregate(Answers.of([3]), Totals(3.0, 1.0), dtype=torch.float64)[0].item() == 1.0 / 3.0


def test_sums_and_means_over_answers_skip_nobody() -> None:
    """An answer without learnt tokens, in the middle or at the end, has sum and mean zero."""
    answers = Answers.of([2, 0, 1, 0])
    x = torch.tensor([1.0, 3.0, 5.0], requires_grad=True)
    assert answers.lengths.tolist() == [2, 0, 1, 0]
    assert answers.sum(x).tolist() == [4.0, 0.0, 5.0, 0.0]
    assert answers.mean(x).tolist() == [2.0, 0.0, 5.0, 0.0]
    assert answers.spread(answers.mean(x)).tolist() == [2.0, 2.0, 5.0]
    answers.mean(x).sum().backward()
    assert x.grad.tolist() == [0.5, 0.5, 1.0]


def test_tokens_may_lie_in_any_order() -> None:
    answers = Answers(torch.tensor([1, 0, 1]), 2)
    assert answers.mean(torch.tensor([1.0, 7.0, 3.0])).tolist() == [7.0, 2.0]


def test_sums_over_answers_in_half_precision_do_not_stop_growing() -> None:
    assert Answers.of([400]).sum(torch.ones(400, dtype=torch.bfloat16)).tolist() == [400.0]
