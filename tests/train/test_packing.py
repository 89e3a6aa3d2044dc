"""Micro-batches: a hard cap, few of them, evenly filled."""

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleuve.train.packing import first_fit_decreasing, pack

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "decoupled_loss_and_packing.json"

lengths_and_budget = st.integers(1, 400).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=60), st.just(budget))
)


def _loads(bins: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in b) for b in bins]


@given(lengths_and_budget)
def test_every_sequence_is_in_exactly_one_micro_batch_and_none_is_over_the_budget(case) -> None:
    lengths, budget = case
    bins = pack(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(load <= budget for load in _loads(bins, lengths))


@given(lengths_and_budget)
@example(([12, 17, 12, 28, 18, 47], 49))
def test_never_more_micro_batches_than_first_fit_decreasing_and_never_less_even(case) -> None:
    lengths, budget = case
    ours, plain = _loads(pack(lengths, budget), lengths), _loads(first_fit_decreasing(lengths, budget), lengths)
    assert len(ours) <= len(plain)
    assert max(ours, default=0) <= max(plain, default=0) or len(ours) < len(plain)
    if ours and len(ours) == len(plain):
        assert statistics.pvariance(ours) <= statistics.pvariance(plain)


@given(lengths_and_budget)
def test_the_same_lengths_give_the_same_micro_batches(case) -> None:
    assert pack(*case) == pack(*case)


def _reference_cases() -> list:
    if not CASES.exists():
        reason = "the reference cases (shared/cases) are not beside this checkout"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    cases = json.loads(CASES.read_text())["packing"]
    return [pytest.param(c, id=f"{c['distribution']}-{c['seed']}") for c in cases]


@pytest.mark.parametrize("case", _reference_cases())
def test_no_more_than_the_reference_s_micro_batches_and_better_balanced(case: dict) -> None:
    lengths, budget = case["lengths"], case["budget"]
    plain = first_fit_decreasing(lengths, budget)
    assert len(plain) == case["ffd_micro_batches"]
    loads = _loads(pack(lengths, budget), lengths)
    assert len(loads) <= case["ffd_micro_batches"]
    assert max(loads) <= budget
    spread = max(loads) - min(loads)
    plain_spread = max(_loads(plain, lengths)) - min(_loads(plain, lengths))
    assert spread < plain_spread / 2


def test_a_sequence_over_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 2 has 101 tokens, more than the token budget of 100"):
        pack([3, 100, 101], 100)


def test_nothing_makes_no_micro_batch() -> None:
    assert pack([], 10) == []
