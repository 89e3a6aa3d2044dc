"""Times that follow a model give its constants back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from cluster import cluster
from hypothesis import given
from hypothesis import strategies as st

from fleuve.config.loader import dump_settings
from fleuve.config.settings import Settings
from fleuve.config.simulation import MeasuredSettings
from fleuve.errors import UserError
from fleuve.simulate.calibrate import (
    EngineStep,
    fit_engine,
    fit_trainer,
    learnt_share,
    non_negative,
    prompt_share,
    prompt_tokens,
    verdict_seconds,
)
from fleuve.simulate.lengths import Lognormal
from fleuve.simulate.trainer_costs import TrainerCosts

constants = st.floats(1e-6, 1e-1)


@given(base=constants, each=constants, kv=st.floats(1e-9, 1e-5), prefill=constants, token=st.floats(1e-7, 1e-3))
def test_an_engines_steps_give_back_what_they_were_made_of(
    base: float, each: float, kv: float, prefill: float, token: float
) -> None:
    decodes = [
        EngineStep(base + each * n + kv * n * cached, sequences=n, kv_tokens=n * cached)
        for n in (1, 8, 64)
        for cached in (10, 1000)
    ]
    prefills = [EngineStep(prefill + token * n, prefill_tokens=n) for n in (16, 4096)]
    found = fit_engine([*decodes, *prefills])
    for step in decodes:
        predicted = found["decode_base"] + found["decode_per_sequence"] * step.sequences
        assert predicted + found["decode_per_kv_token"] * step.kv_tokens == pytest.approx(step.seconds, rel=1e-5)
    assert found["prefill_base"] + found["prefill_per_token"] * 100 == pytest.approx(prefill + token * 100, rel=1e-5)
    MeasuredSettings.model_validate(found)


def test_a_prefill_costs_what_a_step_takes_longer_for_it() -> None:
    """The embedded engine computes prompts beside others' tokens, and samples the first token in the same step."""
    steps = [EngineStep(0.002 + 1e-4 * n + 1e-6 * k, n, k) for n in (1, 8) for k in (100, 1000)]
    steps += [EngineStep(0.002 + 1e-4 * n + 1e-6 * 100 + 5e-5 * t, n, 100, t) for n in (1, 8) for t in (16, 4096)]
    found = fit_engine(steps)
    assert (found["prefill_base"], found["prefill_per_token"]) == pytest.approx((0.0, 5e-5), abs=1e-9)
    assert found["decode_base"] == pytest.approx(0.002)


def test_no_constant_is_negative_where_noise_would_make_it_so() -> None:
    assert non_negative([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])[1] == 0.0


def test_steps_of_one_size_tell_nothing_apart() -> None:
    with pytest.raises(ValueError, match="different sizes"):
        fit_engine([EngineStep(1.0, sequences=1, kv_tokens=5)] * 9)


def run_directory(path: Path, settings: Settings, steps: int) -> None:
    """A run whose times are those of the cost model: groups of two, every third without anything to learn."""
    costs, rng = TrainerCosts.of(settings), random.Random(0)
    (path / "rollouts").mkdir()
    (path / "config.toml").write_text(dump_settings(settings))
    rows = []
    for step in range(1, steps + 1):
        groups: list[dict[str, Any]] = []
        for g in range(settings.control.batch_size):
            advantage = 0.0 if g % 3 == 0 else 1.0
            answers = [{"output_ids": [1] * rng.randint(1, 900), "advantage": advantage, "reward": 1.0} for _ in "ab"]
            groups.append({"prompt_ids": [1] * 11, "trajectories": answers})
        half = len(groups) // 2
        minibatches = [
            [10 + len(t["output_ids"]) for g in part for t in g["trajectories"] if t["advantage"]]
            for part in (groups[:half], groups[half:])
        ]
        alone = sum(costs.step_seconds([m]) - 0.5 for m in minibatches)
        together = costs.step_seconds(minibatches) - 0.5
        rows.append(
            {
                "step": step,
                "time/update": alone,
                "time/proximal": together - alone,
                "time/publish": 0.02,
                "time/wait_for_batch": 3.0,
                "time/step": together + 0.02 + 3.0 + 0.5,
                "time/weight_sync": 0.03,
            }
        )
        lines = "\n".join(json.dumps(group) for group in groups)
        (path / "rollouts" / f"step-{step:06d}.jsonl").write_text(lines + "\n")
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def test_a_runs_trainer_gives_back_what_its_times_were_made_of(tmp_path: Path) -> None:
    measured = {"train_per_token": 3e-4, "forward_per_token": 1e-4, "train_per_micro_batch": 0.04, "step": 0.5}
    settings = cluster(
        "builtin:small",
        trainer={"token_budget": 2048, "minibatches": 2},
        simulate={"gpus": 2, "rollout_gpus": 1, "measured": measured},
    )
    run_directory(tmp_path, settings, steps=6)
    found = fit_trainer(tmp_path)
    assert found == pytest.approx(measured | {"publish": 0.02, "update": 0.03}, rel=1e-6)
    assert prompt_tokens(tmp_path) == 11
    MeasuredSettings.model_validate(found)


def test_times_of_the_same_batches_made_again_take_the_place_of_the_runs(tmp_path: Path) -> None:
    settings = cluster("builtin:small", trainer={"minibatches": 2})
    run_directory(tmp_path, settings, steps=6)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    again = {row["step"]: {name: row[name] / 2 for name in ("time/update", "time/proximal")} for row in rows}
    own, other = fit_trainer(tmp_path), fit_trainer(tmp_path, again)
    parts = ("train_per_token", "forward_per_token", "train_per_micro_batch")
    assert [other[name] for name in parts] == pytest.approx([own[name] / 2 for name in parts])
    assert [other[name] for name in ("step", "publish", "update")] == [own[n] for n in ("step", "publish", "update")]


def group_of(lengths: list[int], advantage: float = 1.0) -> str:
    answers = [{"output_ids": [1] * n, "advantage": advantage, "reward": 1.0} for n in lengths]
    return json.dumps({"prompt_ids": [1] * 10, "trajectories": answers})


def test_what_is_learnt_from_counts_by_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    lines = [group_of([31, 31]), group_of([11, 11], advantage=0.0)]
    (tmp_path / "rollouts" / "step-000001.jsonl").write_text("\n".join(lines))
    assert learnt_share(tmp_path) == pytest.approx(40 / 60)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_a_runs_answers_give_back_what_part_of_their_lengths_is_the_prompts(tmp_path: Path, share: float) -> None:
    draw = Lognormal(mean=40, sigma=0.9, longest=256, prompt_share=share).draw
    lines = [group_of([draw(str(prompt), sample) for sample in range(8)]) for prompt in range(600)]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-000001.jsonl").write_text("\n".join(lines))
    assert prompt_share(tmp_path) == pytest.approx(share, abs=0.05)


def test_a_verdict_takes_its_check_and_the_wait_for_it(tmp_path: Path) -> None:
    rows = [
        {"step": step, "reward_service/seconds_mean": s, "reward_service/queue_seconds_mean": s / 4}
        for step, s in enumerate((8.0, 0.004))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert verdict_seconds(tmp_path) == pytest.approx(0.005)


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    for fit in (fit_trainer, learnt_share, prompt_share, verdict_seconds):
        with pytest.raises(UserError) as error:
            fit(tmp_path)
        assert "\n" not in str(error.value)
