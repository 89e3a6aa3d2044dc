"""pass@k and confidence intervals."""

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleuve.evaluate.statistics import mean_with_interval, pass_at_k, reported_k


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_fraction_of_draws_that_hold_a_right_answer(samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    draws = list(combinations([i < right for i in range(samples)], k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_large_numbers_is_exact() -> None:
    assert pass_at_k(1000, 1, 1) == pytest.approx(0.001)
    assert pass_at_k(10_000, 5_000, 64) == 1.0


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, right, k)


def test_pass_at_powers_of_two_and_at_all_samples_is_reported() -> None:
    assert reported_k(1) == [1]
    assert reported_k(8) == [1, 2, 4, 8]
    assert reported_k(10) == [1, 2, 4, 8, 10]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_an_interval_lies_in_the_unit_interval_around_its_mean(means: list[float]) -> None:
    mean, low, high = mean_with_interval(means)
    assert 0.0 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1.0


def test_all_right_is_not_certainty() -> None:
    assert mean_with_interval([1.0] * 20) == (1.0, pytest.approx(0.839, abs=1e-3), 1.0)
    assert mean_with_interval([0.0])[2] > 0.7


def test_nineteen_in_twenty_intervals_hold_the_truth() -> None:
    rng = random.Random(0)
    for truth, problems, samples in ((0.5, 60, 1), (0.1, 60, 1), (0.3, 60, 4)):
        held = 0
        for _ in range(600):
            # Problems differ in difficulty: answers to one of them are not independent.
            chances = [rng.betavariate(2 * truth, 2 * (1 - truth)) for _ in range(problems)]
            means = [sum(rng.random() < chance for _ in range(samples)) / samples for chance in chances]
            _, low, high = mean_with_interval(means)
            held += low <= truth <= high
        assert 0.92 <= held / 600 <= 0.98
