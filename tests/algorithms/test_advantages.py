"""Advantages compare the answers to one prompt with each other, and tokens with what a critic expected of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleuve.algorithms.advantages import gae, group_relative, leave_one_out, reward_to_go, whiten, without_baseline

rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=1, max_size=12)
rejected = st.sampled_from([None, math.nan, math.inf, -math.inf])
BASELINES = {
    "grpo": group_relative,
    "dr_grpo": lambda r: group_relative(r, normalise=False),
    "rloo": leave_one_out,
    "reinforce": without_baseline,
}
baselines = st.sampled_from(list(BASELINES))


@given(rewards, rewards, rejected, baselines)
def test_a_rejected_answer_gets_no_advantage_and_shifts_nobody(
    first: list[float], second: list[float], bad: float | None, name: str
) -> None:
    baseline = BASELINES[name]
    with_gap = baseline([*first, bad, *second])
    assert with_gap[len(first)] is None
    assert with_gap[: len(first)] + with_gap[len(first) + 1 :] == baseline(first + second)


@given(rewards, st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_advantages_against_a_baseline_sum_to_zero(values: list[float], name: str) -> None:
    assert sum(BASELINES[name](values)) == pytest.approx(0.0, abs=1e-6)


@given(st.floats(-10, 10), st.integers(1, 12), st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_a_group_whose_answers_tie_has_exactly_zero_advantages(reward: float, size: int, name: str) -> None:
    """One answer alone is such a group."""
    assert BASELINES[name]([reward] * size) == [0.0] * size


@given(baselines)
def test_a_group_without_any_reward_has_no_advantages(name: str) -> None:
    assert BASELINES[name]([None, math.nan]) == [None, None]
    assert BASELINES[name]([]) == []


def test_group_relative_advantages_of_a_worked_example() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, unbiased standard deviation √(1/3)."""
    assert group_relative([1.0, 0.0, 0.0, 1.0], normalise=False) == [0.5, -0.5, -0.5, 0.5]
    assert group_relative([1.0, 0.0, 0.0, 1.0])[0] == pytest.approx(0.5 / math.sqrt(1 / 3), abs=1e-5)


@given(rewards.filter(lambda r: len(r) > 1))
def test_each_answer_is_compared_with_the_mean_of_the_others(values: list[float]) -> None:
    expected = [r - (sum(values) - r) / (len(values) - 1) for r in values]
    assert leave_one_out(values) == pytest.approx(expected, abs=1e-9)


def test_reward_to_go_discounts_what_is_still_to_come() -> None:
    assert reward_to_go(torch.tensor([1.0, 0.0, 4.0]), 0.5).tolist() == [2.0, 2.0, 4.0]


token_values = st.lists(st.floats(-3, 3), min_size=1, max_size=9)


def _tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(token_values, st.floats(0, 1), st.floats(0, 1), st.data())
def test_gae_is_the_discounted_sum_of_temporal_differences(
    values: list[float], gamma: float, lam: float, data: st.DataObject
) -> None:
    """By its definition, a double sum, with the value after the last token zero."""
    n = len(values)
    r = data.draw(st.lists(st.floats(-3, 3), min_size=n, max_size=n))
    v = [*values, 0.0]
    delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
    expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
    advantages, returns = gae(_tensor(r), _tensor(values), gamma, lam)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    assert returns.tolist() == pytest.approx([a + x for a, x in zip(expected, values, strict=True)], abs=1e-9)


@given(token_values, token_values, st.floats(0, 1))
def test_gae_with_lambda_one_is_reward_to_go_less_value(r: list[float], v: list[float], gamma: float) -> None:
    n = min(len(r), len(v))
    token_rewards, values = _tensor(r[:n]), _tensor(v[:n])
    advantages, returns = gae(token_rewards, values, gamma, 1.0)
    assert torch.allclose(returns, reward_to_go(token_rewards, gamma), atol=1e-9)
    assert torch.allclose(advantages, reward_to_go(token_rewards, gamma) - values, atol=1e-9)


def test_an_answer_of_one_token_has_its_reward_less_its_value() -> None:
    advantages, returns = gae(torch.tensor([1.0]), torch.tensor([0.25]), 0.9, 0.9)
    assert (advantages.tolist(), returns.tolist()) == ([0.75], [1.0])


def test_an_answer_without_tokens_has_no_advantages() -> None:
    empty = torch.zeros(0)
    assert [len(x) for x in (*gae(empty, empty, 1.0, 0.95), reward_to_go(empty, 1.0))] == [0, 0, 0]


def test_a_critics_gradient_does_not_come_back_through_advantages() -> None:
    values = torch.tensor([0.5, 0.5], requires_grad=True)
    assert not any(x.requires_grad for x in (*gae(torch.ones(2), values, 1.0, 1.0), *whiten([values])))


batches = st.lists(st.lists(st.floats(-5, 5), max_size=5), max_size=5)


@given(batches)
def test_a_whitened_batch_has_mean_zero_and_unbiased_variance_one(batch: list[list[float]]) -> None:
    whitened = whiten([_tensor(a) for a in batch])
    assert [len(a) for a in whitened] == [len(a) for a in batch]
    flat = [x for a in whitened for x in a.tolist()]
    assert all(map(math.isfinite, flat))
    assert sum(flat) == pytest.approx(0.0, abs=1e-6)
    values = _tensor([x for a in batch for x in a])
    if len(values) > 1 and float(values.var()) > 1e-3:
        assert float(_tensor(flat).var()) == pytest.approx(1.0, abs=1e-4)


def test_whitening_without_shifting_keeps_the_mean() -> None:
    batch = [_tensor([3.0, 5.0]), _tensor([7.0])]
    assert torch.cat(whiten(batch, shift_mean=False)).tolist() == pytest.approx([4.0, 5.0, 6.0])
    assert torch.cat(whiten(batch)).tolist() == pytest.approx([-1.0, 0.0, 1.0])


@pytest.mark.parametrize("batch", [[[2.5]], [[0.1, 0.1], [0.1]], [[2.5], []]])
def test_a_batch_without_scale_whitens_to_zero(batch: list[list[float]]) -> None:
    tensors = [torch.tensor(a) for a in batch]
    assert torch.cat(whiten(tensors)).tolist() == [0.0] * sum(map(len, batch))
    assert torch.cat(whiten(tensors, shift_mean=False)).tolist() == pytest.approx([x for a in batch for x in a])


def test_nothing_whitens_to_nothing() -> None:
    assert whiten([]) == []
    assert [a.tolist() for a in whiten([torch.zeros(0)])] == [[]]


def test_half_precision_is_worked_in_float32() -> None:
    """In bf16, 256 + 1 is 256; the sum of a long answer's rewards would stop growing."""
    to_go = reward_to_go(torch.ones(400, dtype=torch.bfloat16), 1.0)
    assert to_go.dtype == torch.float32
    assert to_go[0].item() == 400.0
    advantages, returns = gae(torch.ones(400, dtype=torch.bfloat16), torch.zeros(400, dtype=torch.bfloat16), 1.0, 1.0)
    assert advantages[0].item() == returns[0].item() == 400.0
    assert torch.cat(whiten([torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)])).tolist() == [-1.0, 0.0, 1.0]
