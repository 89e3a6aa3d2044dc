"""What an engine takes, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cluster import IDEAL, cluster
from hypothesis import given
from hypothesis import strategies as st

from fleuve.errors import UserError
from fleuve.simulate.engine_costs import EngineCosts

ACTIVE = 7_615_616_512 - 152_064 * 3_584
"""Of the 7B model, without the input embedding."""


def engine(**simulate: Any) -> EngineCosts:
    return EngineCosts.of(
        cluster(simulate={"hardware": "h100", "gpus": 16, "rollout_gpus": 8, "costs": IDEAL, **simulate})
    )


def test_a_decode_step_of_one_sequence_is_reading_the_weights() -> None:
    base, _ = engine().decode(1)
    assert base == pytest.approx(2 * ACTIVE / 3.35e12)  # 4.2 ms


def test_each_cached_token_is_read_once_a_step() -> None:
    _, per_kv = engine().decode(1)
    assert per_kv == pytest.approx(57_344 / 3.35e12)


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    base, _ = engine().decode(2048)
    assert base == pytest.approx(2 * ACTIVE * 2048 / 989e12)
    ridge = 989e12 / 3.35e12  # sequences at which a weight of two bytes takes as long to read as to use
    below, above = engine().decode(int(ridge) - 1)[0], engine().decode(int(ridge) + 2)[0]
    assert below == pytest.approx(2 * ACTIVE / 3.35e12)
    assert above > below


def test_overheads_and_shares_are_what_the_settings_say() -> None:
    costs = {**IDEAL, "bandwidth_share": 0.5, "decode_overhead": 0.003, "sequence_overhead": 0.001}
    base, per_kv = engine(costs=costs).decode(2)
    assert base == pytest.approx(0.003 + 2 * 0.001 + 2 * ACTIVE / (3.35e12 / 2))
    assert per_kv == pytest.approx(57_344 / (3.35e12 / 2))


def test_two_devices_read_half_each_and_exchange_hidden_states() -> None:
    one, two = engine(), engine(tensor_parallel=2)
    exchanged = 2 * 28 * 10 * 3584 * 2  # two all-reduces a layer, 10 tokens, hidden size, bytes
    assert two.decode(10)[0] == pytest.approx(one.decode(10)[0] / 2 + 2 * (1 / 2) * exchanged / 450e9)
    assert two.decode(10)[1] == pytest.approx(one.decode(10)[1] / 2)


def test_more_devices_than_key_value_heads_read_the_cache_no_faster() -> None:
    two, four = (  # the 1.5B model has 2
        EngineCosts.of(cluster("qwen-1.5b", simulate={"gpus": 16, "costs": IDEAL, "tensor_parallel": devices}))
        for devices in (2, 4)
    )
    assert four.decode(1)[1] == pytest.approx(two.decode(1)[1])


def test_devices_that_do_not_divide_the_attention_heads_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"simulate.tensor_parallel = 8 does not divide the 28 .* qwen-7b; 7 does$"):
        engine(tensor_parallel=8)


def test_prefill_is_two_operations_a_parameter_and_four_a_pair() -> None:
    tokens = 4096
    flops = 2 * ACTIVE * tokens + 4 * 28 * 3584 * tokens**2 / 2
    assert engine().prefill_seconds(tokens, pairs=tokens**2 / 2) == pytest.approx(flops / 989e12)
    assert engine().prefill_seconds(0) == 0.0


def test_a_short_prefill_still_reads_the_weights() -> None:
    assert engine().prefill_seconds(1) == pytest.approx(2 * ACTIVE / 3.35e12)


def test_new_weights_come_over_every_devices_own_adapter() -> None:
    assert engine().update_seconds() == pytest.approx(2 * 7_615_616_512 / 50e9)
    assert engine(tensor_parallel=2).update_seconds() == pytest.approx(7_615_616_512 / 50e9)


def test_the_cache_is_what_the_weights_and_the_workspace_leave() -> None:
    weights = 2 * 7_615_616_512
    workspace = 2e9 + 4096 * (4 * 3584 + 3 * 18944) * 2 + 64 * 152_064 * 8
    assert engine(max_running=64).kv_capacity_tokens == int((80e9 - weights - workspace) / 57_344)


def test_twice_the_devices_hold_more_than_twice_the_cache() -> None:
    assert engine(tensor_parallel=2).kv_capacity_tokens > 2 * engine().kv_capacity_tokens


def test_without_a_cluster_the_engine_is_the_runs_own() -> None:
    settings = cluster("builtin:small", rollout={"max_running": 12, "kv_cache_tokens": 5000, "max_new_tokens": 64})
    own = settings.model_copy(
        update={"simulate": settings.simulate.model_copy(update={"gpus": None, "rollout_gpus": None})}
    )
    costs = EngineCosts.of(own)
    assert (costs.max_running, costs.kv_capacity_tokens) == (12, 5000)


def test_what_was_measured_replaces_the_model() -> None:
    measured = {
        "decode_base": 0.01,
        "decode_per_sequence": 0.001,
        "decode_per_kv_token": 1e-6,
        "prefill_base": 0.5,
        "prefill_per_token": 1e-4,
        "per_answer": 0.002,
        "update": 0.25,
    }
    costs = engine(measured=measured)
    assert costs.decode(8) == pytest.approx((0.01 + 8 * 0.001, 1e-6))
    assert costs.prefill_seconds(100, pairs=1e9) == pytest.approx(0.5 + 0.01)
    assert costs.prefill_seconds(100, pairs=1e9, answers=3) == pytest.approx(0.5 + 0.01 + 0.006)
    assert costs.prefill_seconds(0, answers=3) == pytest.approx(0.006)  # prompts that are in the cache
    assert costs.update_seconds() == 0.25


def test_a_model_that_leaves_no_room_for_one_answer_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"an engine on 1 × h100 has room for .* tokens .* qwen-32b") as error:
        EngineCosts.of(cluster("qwen-32b", rollout={"max_new_tokens": 60_000}))
    assert "\n" not in str(error.value)


@given(sequences=st.integers(1, 2000), more=st.integers(1, 500), devices=st.sampled_from([1, 2, 4, 8]))
def test_a_larger_batch_takes_longer_a_step_and_less_a_sequence(sequences: int, more: int, devices: int) -> None:
    costs = replace(engine(costs={}), devices=devices)
    few, many = costs.decode(sequences)[0], costs.decode(sequences + more)[0]
    assert few <= many
    assert many / (sequences + more) <= few / sequences


@given(tokens=st.integers(1, 10**6), more=st.integers(1, 10**6), pairs=st.floats(0, 1e12))
def test_more_prefill_takes_longer(tokens: int, more: int, pairs: float) -> None:
    costs = engine(costs={})
    assert 0 < costs.prefill_seconds(tokens, pairs) <= costs.prefill_seconds(tokens + more, 2 * pairs)
