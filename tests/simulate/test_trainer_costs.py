"""What a training step takes, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cluster import IDEAL, cluster
from hypothesis import given
from hypothesis import strategies as st

from fleuve.errors import UserError
from fleuve.simulate.layout import layout_of
from fleuve.simulate.trainer_costs import TrainerCosts

PARAMETERS = 7_615_616_512
ACTIVE = PARAMETERS - 152_064 * 3_584
PEAK = 989e12
ATTENTION = 4 * 28 * 3584
"""Operations of a pair of a query and a key in all layers of the 7B model."""


def trainer(gpus: int = 1, training: dict[str, Any] | None = None, **simulate: Any) -> TrainerCosts:
    """The 7B model on `gpus`; no activations are recomputed unless `training` says so."""
    return TrainerCosts.of(
        cluster(
            trainer={"activation_checkpointing": False, **(training or {})},
            simulate={"hardware": "h100", "gpus": gpus + 1, "rollout_gpus": 1, "costs": IDEAL, **simulate},
        )
    )


def test_a_trained_token_is_six_operations_a_parameter_and_attention() -> None:
    tokens = 1000
    pairs = tokens**2 / 2
    assert trainer().flops([tokens], backward=True) == pytest.approx(6 * ACTIVE * tokens + 3.5 * ATTENTION * pairs)
    assert trainer().flops([tokens], backward=False) == pytest.approx(2 * ACTIVE * tokens + ATTENTION * pairs)


def test_recomputed_activations_are_one_more_forward_pass() -> None:
    again = trainer(training={"activation_checkpointing": True})
    difference = again.flops([1000], True) - trainer().flops([1000], True)
    assert difference == pytest.approx(trainer().flops([1000], False))


def test_attention_costs_the_square_of_each_sequence_and_packing_does_not_change_it() -> None:
    two, one = trainer().flops([500, 500], True), trainer().flops([1000], True)
    assert one - two == pytest.approx(3.5 * ATTENTION * (1000**2 - 2 * 500**2) / 2)


def test_a_step_is_both_minibatches_one_proximal_pass_and_two_updates() -> None:
    costs = trainer()
    update = PARAMETERS * 40 / 3.35e12
    expected = (2 * costs.flops([1000], True) + costs.flops([1000], False)) / PEAK + 2 * update
    assert costs.step_seconds([[1000], [1000]]) == pytest.approx(expected)


def test_the_first_minibatch_that_learns_needs_no_proximal_pass() -> None:
    costs = trainer()
    assert costs.step_seconds([[], [1000]]) == costs.step_seconds([[1000], []]) == costs.step_seconds([[1000]])


def test_without_anything_to_learn_only_the_steps_overhead_is_left() -> None:
    assert trainer(costs={**IDEAL, "step_overhead": 3.0}).step_seconds([[], []]) == 3.0


def test_the_slowest_rank_counts() -> None:
    even, uneven = trainer(2).step_seconds([[1000, 1000]]), trainer(2).step_seconds([[1000, 100]])
    alone = trainer(2).step_seconds([[1000]])
    assert even == pytest.approx(alone)
    assert uneven == pytest.approx(alone)


def test_sharded_weights_are_gathered_twice_and_their_gradients_scattered_once() -> None:
    short = trainer(2)  # one token: the wires take longer than the arithmetic
    gathered = 2 * PARAMETERS * (1 / 2) / 450e9
    update = PARAMETERS / 2 * 40 / 3.35e12
    assert short.step_seconds([[1, 1]]) == pytest.approx(3 * gathered + update)


def test_tensor_parallel_training_halves_the_arithmetic_and_pays_for_it_on_the_wires() -> None:
    one, two = trainer(), trainer(2, trainer_parallel=2)
    exchanged = 2 * 28 * 10_000 * 3584 * 2
    expected = one.flops([10_000], True) / 2 / PEAK + 2 * 2 * (1 / 2) * exchanged / 450e9
    assert two.micro_batch_seconds([10_000], True) == pytest.approx(expected)


def test_weights_are_published_over_all_adapters_of_the_trainer() -> None:
    assert trainer().publish_seconds() == pytest.approx(2 * PARAMETERS / 50e9)
    assert trainer(4).publish_seconds() == pytest.approx(2 * PARAMETERS * (3 / 4 / 450e9 + 1 / 4 / 50e9))


def test_what_was_measured_replaces_the_model() -> None:
    measured = {
        "train_per_token": 0.003,
        "forward_per_token": 0.001,
        "train_per_micro_batch": 0.1,
        "step": 0.5,
        "publish": 0.2,
    }
    costs = trainer(measured=measured)
    # Two minibatches of one micro-batch each, and the second's proximal pass.
    assert costs.step_seconds([[100], [100]]) == pytest.approx(0.5 + 2 * 0.3 + 0.1 + 3 * 0.1)
    assert costs.publish_seconds() == 0.2


def test_a_sequence_over_the_token_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than the token budget"):
        trainer().step_seconds([[16385]])


sequences = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


@given(lengths=sequences, ranks=st.integers(1, 9), budget=st.integers(1000, 4000))
def test_every_sequence_is_in_one_micro_batch_of_one_rank_and_all_ranks_run_as_many(
    lengths: list[int], ranks: int, budget: int
) -> None:
    steps = replace(trainer(ranks), token_budget=budget).rounds(lengths)
    assert all(len(step) == ranks for step in steps)
    assert sorted(n for step in steps for rank in step for n in rank) == sorted(lengths)
    assert all(sum(rank) <= budget for step in steps for rank in step)


@given(minibatches=st.lists(sequences, min_size=1, max_size=4), gpus=st.integers(1, 16))
def test_no_step_is_faster_than_perfect_balance(minibatches: list[list[int]], gpus: int) -> None:
    costs = trainer(gpus)
    work = sum(costs.flops(lengths, backward=True) for lengths in minibatches)
    assert costs.step_seconds(minibatches) >= work / (gpus * PEAK)
    assert work / (gpus * PEAK) <= costs.least_seconds(minibatches) <= costs.step_seconds(minibatches) * (1 + 1e-9)


@given(minibatches=st.lists(sequences, min_size=1, max_size=4), gpus=st.integers(1, 8))
def test_a_step_is_longer_at_lower_utilisation(minibatches: list[list[int]], gpus: int) -> None:
    slower = trainer(gpus, costs={**IDEAL, "train_flops_share": 0.5, "network_share": 0.5, "bandwidth_share": 0.5})
    assert slower.step_seconds(minibatches) == pytest.approx(2 * trainer(gpus).step_seconds(minibatches))


def test_a_wider_model_reaches_more_of_the_arithmetic() -> None:
    costs = trainer(costs={**IDEAL, "train_flops_share": 0.6, "train_half_width": 1792.0})
    assert costs.utilisation == pytest.approx(0.6 * 2 / 3)  # its width is 3584
    assert costs.micro_batch_seconds([1000], True) == pytest.approx(costs.flops([1000], True) / (0.4 * PEAK))
    assert trainer(costs={**IDEAL, "train_flops_share": 0.6}).utilisation == 0.6


def colocated_trainer(switch_seconds: float) -> TrainerCosts:
    return TrainerCosts.of(
        cluster(
            launch={"placement": "colocated"},
            simulate={"rollout_gpus": None, "costs": {**IDEAL, "switch_seconds": switch_seconds}},
        )
    )


def test_colocated_devices_change_over_before_a_step_and_back_after_publishing() -> None:
    at_once, slow = colocated_trainer(0.0), colocated_trainer(20.0)
    batch = [[1000, 500], [700]]
    assert slow.step_seconds(batch) == pytest.approx(at_once.step_seconds(batch) + 20)
    assert slow.least_seconds(batch) == pytest.approx(at_once.least_seconds(batch) + 20)
    assert slow.publish_seconds() == pytest.approx(at_once.publish_seconds() + 20)


def test_devices_of_their_own_never_change_over() -> None:
    costs = trainer(costs={**IDEAL, "switch_seconds": 20.0})
    assert costs.step_seconds([[1000]]) == trainer().step_seconds([[1000]])
    assert costs.publish_seconds() == trainer().publish_seconds()


def test_three_quarters_generate_when_nobody_says_otherwise() -> None:
    layout = layout_of(cluster(simulate={"rollout_gpus": None, "gpus": 32, "tensor_parallel": 4}))
    assert (layout.engines, layout.rollout_gpus, layout.ranks, layout.gpus) == (6, 24, 8, 32)


def test_colocated_every_device_does_both() -> None:
    layout = layout_of(cluster(launch={"placement": "colocated"}, simulate={"rollout_gpus": None}))
    assert (layout.rollout_gpus, layout.trainer_gpus, layout.gpus) == (16, 16, 16)


@pytest.mark.parametrize(
    ("simulate", "complaint"),
    [
        ({"gpus": 8, "rollout_gpus": 8}, "none is left to train; give it 7 or fewer"),
        ({"gpus": 1, "rollout_gpus": None}, 'set launch.placement = "colocated"'),
        ({"gpus": 8, "rollout_gpus": 6, "tensor_parallel": 4}, "does not divide the 6 GPUs of rollout; 3 does"),
        ({"gpus": 8, "rollout_gpus": 5, "trainer_parallel": 2}, "does not divide the 3 GPUs of training; 1 does"),
        ({"gpus": None, "rollout_gpus": 2}, "needs simulate.gpus"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(simulate: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        layout_of(cluster(simulate=simulate))
    assert "\n" not in str(error.value)
