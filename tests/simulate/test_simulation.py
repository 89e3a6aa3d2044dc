"""A whole run on virtual time, by the production controller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleuve.config.settings import Settings
from fleuve.simulate.run import simulate
from fleuve.simulate.systems import changed, systems
from fleuve.simulate.window import warmup_steps


def small(**changes: Any) -> Settings:
    """Four GPUs, three of which generate; a model so small that the overheads are what counts."""
    settings = Settings.model_validate(
        {
            "run_dir": "unused",
            "steps": 12,
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {"group_size": 4, "max_new_tokens": 2000, "dtype": "bfloat16"},
            "control": {"batch_size": 8, "max_staleness": 2},
            "trainer": {"minibatches": 2, "dtype": "bfloat16", "token_budget": 16384},
            "simulate": {"model": "qwen-1.5b", "hardware": "h800", "gpus": 4, "lengths": {"mean": 600}},
        }
    )
    return changed(settings, {name.replace("__", "."): value for name, value in changes.items()})


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    first, again, other = (simulate(small(simulate__seed=seed)) for seed in (1, 1, 2))
    assert first.as_dict() | {"wall_seconds": 0} == again.as_dict() | {"wall_seconds": 0}
    assert first.step_seconds != other.step_seconds


@pytest.mark.parametrize("name", list(systems(small())))
def test_every_system_is_simulated_by_its_settings_alone(name: str) -> None:
    result = simulate(systems(small())[name])
    eta = systems(small())[name].control.max_staleness
    assert result.simulated == 12
    assert sum(result.rollout.values()) == pytest.approx(1)
    assert sum(result.trainer.values()) == pytest.approx(1)
    assert sum(result.staleness.values()) == pytest.approx(1)
    if "trained" not in name and "masked" not in name:
        assert result.staleness_max <= eta


def test_answers_for_which_there_is_room_whatever_their_length_all_run_at_once() -> None:
    """Room for 32 answers of 64 tokens, and not for 32 times the 512 that are kept free for longer ones."""
    room = 32 * (256 + 64)
    short = small(
        control__max_staleness=0, rollout__max_new_tokens=64, simulate__lengths__mean=64, simulate__kv_cache_tokens=room
    )
    crowded = simulate(changed(short, {"simulate.rollout_gpus": 1}))
    roomy = simulate(changed(short, {"simulate.rollout_gpus": 1, "simulate.kv_cache_tokens": 10 * room}))
    assert crowded.group_seconds == roomy.group_seconds


def test_what_an_answer_costs_beside_its_tokens_is_waited_for() -> None:
    cheap, dear = (
        simulate(
            small(
                control__max_staleness=0,
                simulate__rollout_gpus=1,
                simulate__reward_seconds=0,
                simulate__measured__per_answer=seconds,
            )
        )
        for seconds in (0.0, 0.25)
    )
    assert dear.step_seconds - cheap.step_seconds == pytest.approx(8 * 4 * 0.25, rel=0.02)


def test_without_staleness_nothing_overlaps() -> None:
    result = simulate(small(control__max_staleness=0, launch__placement="colocated"))
    assert result.staleness == {0: 1.0}
    assert result.rollout["paused"] == pytest.approx(result.trainer["train"] + result.trainer["publish"], abs=0.05)
    assert result.interruptions == 0


def test_changing_over_takes_its_time_twice_a_step_and_the_engines_stand_still() -> None:
    alone = {"control__max_staleness": 0, "launch__placement": "colocated"}
    at_once, slow = (simulate(small(**alone, simulate__costs__switch_seconds=seconds)) for seconds in (0.0, 30.0))
    assert slow.step_seconds == pytest.approx(at_once.step_seconds + 60, abs=0.1)
    standing = [result.rollout["paused"] * result.step_seconds for result in (at_once, slow)]
    assert standing[1] == pytest.approx(standing[0] + 60, abs=0.1)


def test_more_staleness_is_faster_until_the_slower_side_is_never_idle() -> None:
    speeds = [simulate(small(control__max_staleness=eta)).trained_tokens_per_second for eta in (0, 1, 4)]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 1.2 * speeds[0]


def test_interruption_recomputes_caches_keeping_them_does_not() -> None:
    shares = {
        kind: simulate(small(control__max_staleness=4, rollout__interrupt=kind)).rollout["recompute"]
        for kind in ("recompute", "keep", "finish")
    }
    assert shares["recompute"] > 0
    assert shares["keep"] == shares["finish"] == 0


def test_a_part_of_a_long_run_is_its_steady_state_and_the_rest_is_extrapolated() -> None:
    result = simulate(small(steps=1000, simulate__steps=14))
    counted = 14 - warmup_steps(2)
    assert (result.simulated, result.warmup) == (14, 14 - counted)
    assert result.hours * 3600 == pytest.approx(1000 * result.step_seconds, rel=0.05)


def test_without_a_bound_on_staleness_the_first_steps_do_not_take_the_whole_runs_prompts() -> None:
    result = simulate(small(steps=100_000, simulate__steps=8, control__max_staleness=1_000_000))
    assert result.simulated == 8
    assert result.wall_seconds < 30


def test_the_timeline_is_a_real_runs(tmp_path: Path) -> None:
    simulate(small(simulate__steps=6), trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    tracks = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"trainer", "weights"} <= tracks
    steps = [e for e in events if e["ph"] == "X" and e["name"].startswith("step ")]
    assert len(steps) == 6
    assert any(e["ph"] == "C" and e["name"] == "rollout/running" for e in events)
