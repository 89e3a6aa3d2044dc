"""Rewards before advantages: shortened for length, scaled and clipped, spread over tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleuve.algorithms.advantages import reward_to_go
from fleuve.algorithms.shaping import overlong_penalty, scaled, token_rewards


def test_the_overlong_penalty_is_a_slope_over_the_buffer() -> None:
    """The published setting: at most 20,480 tokens, of which the last 4,096 are the buffer."""
    lengths = [0, 16_384, 16_384 + 1_024, 20_480, 20_481, 10**6]
    assert [overlong_penalty(n, 20_480, 4_096) for n in lengths] == [0.0, 0.0, -0.25, -1.0, -1.0, -1.0]
    assert overlong_penalty(16_384 + 1_024, 20_480, 4_096, scale=2.0) == -0.5


@given(st.integers(0, 300), st.integers(1, 200), st.data(), st.floats(0, 5))
def test_a_longer_answer_never_pays_less_and_nobody_more_than_the_scale(
    length: int, max_length: int, data: st.DataObject, scale: float
) -> None:
    buffer = data.draw(st.integers(0, max_length))
    shorter, longer = (overlong_penalty(n, max_length, buffer, scale) for n in (length, length + 1))
    assert -scale <= longer <= shorter <= 0.0


def test_without_a_buffer_the_penalty_is_a_cliff() -> None:
    assert [overlong_penalty(n, 10, 0) for n in (9, 10, 11)] == [0.0, 0.0, -1.0]


def test_rewards_are_scaled_then_clipped() -> None:
    assert [scaled(r, 2.0, -1.0, 3.0) for r in (1.0, 2.0, -4.0)] == [2.0, 3.0, -1.0]
    assert scaled(0.3) == 0.3


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_clipping_makes_no_reward_of_what_is_none(bad: float | None) -> None:
    assert scaled(bad, 1.0, -1.0, 1.0) is None


def test_the_reward_is_the_last_tokens_and_the_divergence_each_tokens() -> None:
    kl = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    rewards = token_rewards(1.0, kl, 0.5)
    assert rewards.tolist() == [-0.5, -1.0, -1.0]
    assert not rewards.requires_grad
    assert reward_to_go(rewards, 1.0)[0].item() == pytest.approx(1.0 - 0.5 * 7.0)


def test_an_answer_of_one_token_and_one_of_none() -> None:
    assert token_rewards(1.0, torch.zeros(1), 0.1).tolist() == [1.0]
    assert token_rewards(1.0, torch.zeros(0), 0.1).tolist() == []
