"""Advantages compare the answers to one prompt with each other, and with nothing else."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleuve.algorithms.advantages import group_relative

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "advantages_and_losses.json"

rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=1, max_size=12)


@pytest.mark.skipif(not CASES.exists(), reason="the reference cases (shared/cases) are not beside this checkout")
@pytest.mark.parametrize(("kind", "normalise"), [("grpo", True), ("dr_grpo", False)])
def test_advantages_agree_with_independent_implementations(kind: str, normalise: bool) -> None:
    cases = [c for c in json.loads(CASES.read_text())["advantages"] if c["kind"] == kind]
    assert cases
    for case in cases:
        computed = []
        for group in sorted(set(case["groups"])):
            members = [r for r, g in zip(case["rewards"], case["groups"], strict=True) if g == group]
            computed += group_relative(members, normalise)
        assert computed == pytest.approx(case["advantage_per_answer"], abs=1e-6)


@given(rewards, rewards, st.booleans())
def test_an_answer_without_reward_shifts_nobody(first: list[float], second: list[float], normalise: bool) -> None:
    with_gap = group_relative([*first, None, *second], normalise)
    assert with_gap[len(first)] is None
    assert with_gap[: len(first)] + with_gap[len(first) + 1 :] == group_relative(first + second, normalise)


@given(rewards)
def test_advantages_of_a_group_sum_to_zero(values: list[float]) -> None:
    assert sum(group_relative(values)) == pytest.approx(0.0, abs=1e-6)


@given(st.floats(-10, 10), st.integers(1, 12))
def test_a_group_whose_answers_tie_has_exactly_zero_advantages(reward: float, size: int) -> None:
    assert group_relative([reward] * size) == [0.0] * size


def test_a_group_without_any_reward_has_no_advantages() -> None:
    assert group_relative([None, None]) == [None, None]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_an_error(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_relative([1.0, bad])
