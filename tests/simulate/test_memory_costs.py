"""What fits into one device, against sums done by hand."""

from __future__ import annotations

import pytest
from cluster import cluster

from fleuve.config.settings import Settings
from fleuve.simulate.hardware import load_hardware
from fleuve.simulate.layout import layout_of
from fleuve.simulate.memory import TrainerMemory, activation_bytes, engine_memory, state_bytes, trainer_memory
from fleuve.simulate.model_shape import load_model_shape

SEVEN = 7_615_616_512


def memory(settings: Settings) -> TrainerMemory:
    hardware, shape = load_hardware(settings.simulate.hardware), load_model_shape(settings.model.path)
    return trainer_memory(settings, hardware, shape, layout_of(settings))


def test_a_bf16_trainer_holds_eighteen_bytes_a_parameter_and_an_fp32_one_sixteen() -> None:
    shape = load_model_shape("qwen-7b")
    assert state_bytes(cluster(), shape) == 18 * SEVEN  # master, gradient, two moments, and the bf16 copy
    assert state_bytes(cluster(trainer={"dtype": "float32"}), shape) == 16 * SEVEN


def test_a_critic_of_its_own_doubles_that_and_a_frozen_reference_adds_its_weights() -> None:
    shape = load_model_shape("qwen-7b")
    critic = cluster(algorithm={"preset": "ppo"})
    assert state_bytes(critic, shape) == 2 * 18 * SEVEN
    assert state_bytes(cluster(algorithm={"kl_coefficient": 0.01}), shape) == 20 * SEVEN


def test_where_adapters_learn_the_model_is_there_once_and_is_the_reference() -> None:
    """Qwen2.5-7B's LoRA of rank 8, as peft counts it: 20,185,088 parameters."""
    shape = load_model_shape("qwen-7b")
    assert shape.adapter_parameters(8) == 20_185_088
    kl = {"kl_coefficient": 0.01}
    for algorithm in ({}, kl):
        assert state_bytes(cluster(lora={"rank": 8}, algorithm=algorithm), shape) == 2 * SEVEN + 18 * 20_185_088
    other = cluster(lora={"rank": 8}, algorithm=kl | {"reference": "other"})
    assert state_bytes(other, shape) == 4 * SEVEN + 18 * 20_185_088


def test_the_state_is_sharded_over_all_training_devices() -> None:
    assert memory(cluster()).state == 18 * SEVEN / 8
    assert memory(cluster(simulate={"trainer_parallel": 4})).state == 18 * SEVEN / 8


def test_recomputed_activations_are_each_layers_input_and_one_layer() -> None:
    shape = load_model_shape("qwen-7b")
    layer = 4 * 3584 + 2 * 3584 + 2 * 512 + 3 * 18944
    assert activation_bytes(cluster(), shape) == 2 * (28 * 3584 + layer)
    assert activation_bytes(cluster(trainer={"activation_checkpointing": False}), shape) == 2 * 28 * layer


def test_activations_grow_with_the_token_budget_and_shrink_as_its_tokens_are_shared() -> None:
    whole = memory(cluster())
    assert memory(cluster(trainer={"token_budget": 32768})).activations == 2 * whole.activations
    shared = memory(cluster(trainer={"ranks": 8, "context_parallel": 2}))
    assert shared.activations == whole.activations / 2
    assert shared.gathered == whole.gathered


def test_ranks_that_share_layers_hold_parts_of_them_and_all_that_is_between_and_around() -> None:
    """Qwen2.5-7B: in bf16, and its embeddings and output head, which are not tied, with gradients in fp32."""
    shape, around = load_model_shape("qwen-7b"), 2 * 152_064 * 3584 * (2 + 4)
    assert memory(cluster()).gathered == 8 * shape.layer_parameters + around
    both = memory(cluster(trainer={"ranks": 8, "tensor_parallel": 4}))
    assert both.gathered == 2 * shape.layer_parameters + around
    between, inside = 28 * 3584 + 4 * 3584, 2 * 3584 + 2 * 512 + 3 * 18944
    tokens = cluster().trainer.token_budget
    assert both.activations == tokens * 2 * (between + inside / 4)
    assert both.logits == memory(cluster()).logits


def test_one_device_gathers_nothing() -> None:
    alone = memory(cluster(simulate={"gpus": 2, "rollout_gpus": 1}))
    assert alone.gathered == 0
    assert not alone.fits  # 18 bytes a parameter are 137 GB


def test_the_parts_add_up_to_the_total_that_is_compared() -> None:
    parts = memory(cluster())
    assert parts.total == sum((parts.state, parts.gathered, parts.activations, parts.logits, parts.reserved))
    assert parts.fits
    assert parts.available == 80e9


def test_a_colocated_trainer_takes_its_room_from_the_cache() -> None:
    both = cluster(launch={"placement": "colocated"}, simulate={"rollout_gpus": None})
    hardware, shape = load_hardware("h100"), load_model_shape("qwen-7b")
    apart = engine_memory(cluster(), hardware, shape, layout_of(cluster()))
    together = engine_memory(both, hardware, shape, layout_of(both))
    assert together.state == 18 * SEVEN / 16
    assert memory(both).engine == 2 * SEVEN
    assert apart.kv_tokens - together.kv_tokens == pytest.approx(together.state / 57_344, abs=1)


def test_a_cache_that_is_kept_leaves_no_room_for_a_colocated_trainers_activations() -> None:
    hardware, shape = load_hardware("h100"), load_model_shape("qwen-7b")
    states = []
    for interrupt in ("recompute", "keep"):
        both = cluster(
            launch={"placement": "colocated"},
            rollout={"dtype": "bfloat16", "interrupt": interrupt},
            simulate={"rollout_gpus": None},
        )
        states.append(engine_memory(both, hardware, shape, layout_of(both)).state)
    peak = memory(both)
    assert states[1] - states[0] == pytest.approx(peak.gathered + peak.activations + peak.logits)
