"""Deadlines of a real run hold in a simulated one: a simulation does not get through what a run would not."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleuve.config.loader import dump_changes
from fleuve.config.settings import Settings
from fleuve.contracts import RolloutError, RunError
from fleuve.errors import UserError
from fleuve.rollout.sampling import sampling_params
from fleuve.simulate.clock import run_virtual
from fleuve.simulate.engine import SimulatedEngine
from fleuve.simulate.run import simulate
from fleuve.simulate.systems import changed
from fleuve.types import GenerationRequest, Interrupt, WeightFile


class Times:
    """A step takes a second, and 1 ms more for each answer."""

    kv_capacity_tokens = 10_000
    max_running = 3

    def decode(self, sequences: int) -> tuple[float, float]:
        return 1.0 + sequences / 1000, 0.0

    def prefill_seconds(self, tokens: int, pairs: float = 0.0, answers: int = 0) -> float:
        return 0.01 * tokens

    def update_seconds(self) -> float:
        return 2.5


def request(name: str) -> GenerationRequest:
    sampling = sampling_params(Settings.model_validate(BARE).rollout, 1.0, 0)
    return GenerationRequest(request_id=name, input_ids=np.zeros(5, np.int32), sampling=sampling)


BARE: dict[str, Any] = {
    "run_dir": "unused",
    "model": {"path": "unused"},
    "data": {"train": "unused"},
    "rollout": {"max_new_tokens": 100},
}


async def schedule(seed: int, limit: float, by_caller: bool) -> list[tuple[str, float]]:
    """What became of answers that come at random, with pauses and new weights, and when: given up by the engine's own
    deadlines, or by a timer that the caller has for each."""
    draw = random.Random(seed)
    lengths = {f"a{i}": draw.randint(1, 60) for i in range(20)}
    patience = {} if by_caller else {"request_timeout": limit}
    engine = SimulatedEngine("worker-0", Times(), lambda r: lengths[r.request_id], **patience)
    ends: list[tuple[str, float]] = []

    async def ask(name: str, at: float) -> None:
        await asyncio.sleep(at)
        end = name
        late = f"worker-0: no answer to request {name} within {limit:g} s (rollout.request_timeout)"
        try:
            async with asyncio.timeout(limit if by_caller else None):
                await engine.generate(request(name))
        except TimeoutError:
            end = late
        except RolloutError as error:
            end = str(error)
        ends.append((end, round(asyncio.get_running_loop().time(), 6)))

    async def disturb() -> None:
        for version in range(1, 4):
            await asyncio.sleep(draw.uniform(5, 25))
            await engine.update_weights(WeightFile(version=version, path="", bytes=0, checksum=""), "recompute")
            await engine.pause()
            await asyncio.sleep(draw.uniform(5, 25))
            await engine.resume()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(disturb())
        for name in lengths:
            tasks.create_task(ask(name, draw.uniform(0, 100)))
    return sorted(ends)


@pytest.mark.parametrize("seed", range(15))
def test_answers_are_given_up_when_a_timer_for_each_would_give_them_up(seed: int) -> None:
    limit = random.Random(-seed).uniform(1, 120)
    own, timers = (run_virtual(schedule(seed, limit, by_caller)) for by_caller in (False, True))
    assert own == timers
    assert seed > 3 or any("within" in name for name, _ in own)


def test_an_update_that_takes_too_long_is_given_up_and_one_that_lets_answers_finish_has_their_time_too() -> None:
    async def update(interrupt: Interrupt) -> float:
        engine = SimulatedEngine("worker-0", Times(), lambda _: 90, request_timeout=100, update_timeout=2)
        answer = asyncio.ensure_future(engine.generate(request("a")))
        await asyncio.sleep(1)
        await engine.update_weights(WeightFile(version=1, path="", bytes=0, checksum=""), interrupt)
        await answer
        return asyncio.get_running_loop().time()

    assert run_virtual(update("finish")) > 90
    with pytest.raises(RolloutError, match=r"no answer to the update to version 1 within 2 s \(rollout.update_timeout"):
        run_virtual(update("recompute"))


def short(**changes: object) -> Settings:
    settings = Settings.model_validate(
        {
            "run_dir": "unused",
            "steps": 4,
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {"group_size": 2, "max_new_tokens": 2000, "dtype": "bfloat16"},
            "control": {"batch_size": 4, "max_staleness": 1},
            "trainer": {"dtype": "bfloat16", "token_budget": 8192},
            "simulate": {"model": "qwen-1.5b", "hardware": "h800", "gpus": 4, "lengths": {"mean": 600}},
        }
    )
    return changed(settings, {name.replace("__", "."): value for name, value in changes.items()})


def test_groups_with_an_answer_that_is_late_are_dropped_and_counted() -> None:
    """Some are: the run goes on without them."""
    result = simulate(short(rollout__request_timeout=7.0, steps=12))
    assert result.simulated == 12
    assert result.dropped.get("rollout_failed", 0) > 0
    assert simulate(short(steps=12)).dropped == {}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rollout__request_timeout": 0.5}, r"no answer to request \d+/\d within 0.5 s \(rollout.request_timeout\)"),
        ({"control__group_timeout": 0.5}, r"timeout: not done within 0.5 s"),
        ({"trainer__step_timeout": 0.5}, r"no answer to step 1 \(4 groups\) within 0.5 s \(trainer.step_timeout\)"),
        ({"rollout__update_timeout": 0.1}, r"0.1 s \(rollout.update_timeout\)"),
    ],
)
def test_a_deadline_that_nothing_meets_ends_the_run_with_one_reason(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RunError, match=complaint) as error:
        simulate(short(**changes))
    assert "\n" not in str(error.value)


def test_colocated_an_answer_has_the_trainers_time_too() -> None:
    """As the real client's, which does not count for how long the trainer may have the machine."""
    changes = {"rollout__request_timeout": 0.5, "launch__placement": "colocated", "trainer__step_timeout": 1000.0}
    assert simulate(short(**changes)).dropped == {}


def test_a_budget_that_the_longest_sequence_does_not_fit_is_one_line_though_none_may_be_so_long() -> None:
    with pytest.raises(UserError, match=r"token_budget = 2255 is too small .* give it 2256 or more"):
        simulate(short(trainer__token_budget=2255))
    simulate(short(trainer__token_budget=2256, steps=1))


def test_the_command_says_in_one_line_what_ends_the_run_with_exit_code_1(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(dump_changes(short(control__group_timeout=0.5)))
    command = [sys.executable, "-m", "fleuve", "simulate", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: the groups of")
