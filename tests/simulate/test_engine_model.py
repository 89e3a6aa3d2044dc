"""The event-driven engine does what an engine does that takes one step after the other: same times, same versions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import NaiveEngine

from fleuve.contracts import RolloutError
from fleuve.simulate.clock import run_virtual
from fleuve.simulate.engine import SimulatedEngine
from fleuve.types import Completion, GenerationRequest, Interrupt, SamplingParams, WeightFile

OFF_BEAT = 2.0**-20
"""Events come a few times this after a moment at which a step could end, each its own number of times, so that no two
orders are right."""


@dataclass(frozen=True)
class Times:
    """Powers of two: sums are exact in floating point, so times can be compared with ==."""

    kv_capacity_tokens: int = 10_000
    max_running: int = 64

    def decode(self, sequences: int) -> tuple[float, float]:
        return 1 / 32 + sequences / 1024, 1 / 4096

    def prefill_seconds(self, tokens: int, pairs: float = 0.0, answers: int = 0) -> float:
        return tokens / 256 + pairs / 2048 + answers / 64

    def update_seconds(self) -> float:
        return 0.25


@dataclass(frozen=True)
class Event:
    at: float
    kind: str
    value: int = 0
    interrupt: Interrupt = "recompute"


def request(name: str, prompt: list[int], max_new_tokens: int = 60) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, input_ids=prompt, sampling=SamplingParams(max_new_tokens=max_new_tokens, seed=0)
    )


def length_of(asked: GenerationRequest) -> int:
    return int(asked.request_id.split(":")[1])


async def _play(engine: Any, events: list[Event]) -> dict[str, Any]:
    """Everything that can be seen from outside, with times."""
    loop = asyncio.get_running_loop()
    seen: dict[str, Any] = {}
    tasks: dict[int, asyncio.Task[None]] = {}
    versions = iter(range(1, 100))

    async def ask(number: int, prompt: list[int], event: Event) -> None:
        name = f"{number}:{event.value}"
        completion = await engine.generate(request(name, prompt))
        seen[f"answer {number}"] = (
            loop.time(), list(completion.versions), completion.finish_reason, completion.interruptions
        )  # fmt: skip
        assert len(completion.output_ids) == len(completion.logprobs) == len(completion.versions)

    async def act(number: int, event: Event) -> None:
        await asyncio.sleep(event.at + (2 * number + 1) * OFF_BEAT)
        match event.kind:
            case "group":
                prompt = [0] * (1 + event.value % 7)
                for sample in range(2):
                    tasks[2 * number + sample] = asyncio.create_task(ask(2 * number + sample, prompt, event))
            case "update":
                file = WeightFile(version=next(versions), path="", bytes=0, checksum="")
                reply = await engine.update_weights(file, event.interrupt)
                seen[f"update {number}"] = loop.time(), reply
            case "abort":
                names = [f"{n}:{v}" for n in (event.value, event.value + 1) for v in range(1, 81)]
                await engine.abort(names)
                seen[f"abort {number}"] = loop.time()
            case "cancel":
                if event.value in tasks:
                    tasks[event.value].cancel()
            case "pause":
                await engine.pause()
                await asyncio.sleep(event.value / 8 + OFF_BEAT)
                await engine.resume()

    await asyncio.gather(*(act(number, event) for number, event in enumerate(events)))
    while waiting := [t for t in tasks.values() if not t.done()]:
        await asyncio.wait(waiting)
    return seen


def play_both(events: list[Event], times: Times) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the simulated and the naive engine show, with what they computed."""

    async def simulated() -> dict[str, Any]:
        engine = SimulatedEngine("worker-0", times, length_of, admit_room=4, preempt_room=2)
        seen = await _play(engine, events)
        usage = engine.usage_now()
        total = usage.idle + usage.paused + usage.decode + usage.prefill + usage.load
        assert total == pytest.approx(asyncio.get_running_loop().time())
        return seen | {
            "tokens": engine.tokens_generated(),
            "prefilled": usage.prefilled_tokens,
            "preemptions": usage.preemptions,
        }

    async def naive() -> dict[str, Any]:
        engine = NaiveEngine(times, length_of, admit_room=4, preempt_room=2)
        running = asyncio.create_task(engine.run())
        seen = await _play(engine, events)
        running.cancel()
        return seen | {"tokens": engine.tokens, "prefilled": engine.prefilled, "preemptions": engine.preemptions}

    return run_virtual(simulated()), run_virtual(naive())


moments = st.integers(0, 200).map(lambda n: n / 16)
groups = st.builds(Event, at=moments, kind=st.just("group"), value=st.integers(1, 80))
updates = st.builds(
    Event, at=moments, kind=st.just("update"), interrupt=st.sampled_from(["recompute", "keep", "finish"])
)
aborts = st.builds(Event, at=moments, kind=st.sampled_from(["abort", "cancel"]), value=st.integers(0, 12))
pauses = st.builds(Event, at=moments, kind=st.just("pause"), value=st.integers(1, 30))
schedules = st.lists(st.one_of(groups, groups, groups, updates, aborts, pauses), min_size=1, max_size=12)
worlds = st.builds(
    Times, kv_capacity_tokens=st.sampled_from([68, 150, 10_000]), max_running=st.sampled_from([1, 3, 64])
)


@settings(max_examples=200)
@given(schedules, worlds)
def test_any_schedule_goes_as_it_goes_step_by_step(events: list[Event], times: Times) -> None:
    ours, reference = play_both(events, times)
    assert ours == reference


def test_the_schedules_above_reach_preemption_and_several_versions_in_one_answer() -> None:
    crowd = [Event(0, "group", 60) for _ in range(3)] + [Event(2, "update")]
    ours, reference = play_both(crowd, Times(kv_capacity_tokens=150))
    assert ours == reference
    assert ours["preemptions"] > 0
    assert any(len(set(what[1])) == 2 for name, what in ours.items() if name.startswith("answer"))


def alone(main: Callable[[SimulatedEngine], Any], times: Times, lengths: Callable[[GenerationRequest], int]) -> Any:
    async def run() -> Any:
        return await main(SimulatedEngine("worker-0", times, lengths))

    return run_virtual(run())


def test_an_answer_costs_its_request_its_prefill_and_its_steps() -> None:
    async def main(engine: SimulatedEngine) -> float:
        await engine.generate(request("a", [0] * 8))
        return asyncio.get_running_loop().time()

    prefill = 8 / 256 + 32 / 2048 + 1 / 64
    steps = sum(1 / 32 + 1 / 1024 + (8 + step) / 4096 for step in range(10))
    assert alone(main, Times(), lambda _: 10) == prefill + steps


def test_answers_to_one_prompt_compute_it_once() -> None:
    async def main(engine: SimulatedEngine) -> int:
        prompt = [0] * 8
        await asyncio.gather(*(engine.generate(request(f"{n}", prompt)) for n in range(16)))
        return engine.usage.prefilled_tokens

    assert alone(main, Times(), lambda _: 10) == 8


def test_after_an_update_of_kind_recompute_what_was_cached_is_computed_again_and_after_keep_it_is_not() -> None:
    async def main(engine: SimulatedEngine, interrupt: Interrupt) -> tuple[int, int]:
        answer = asyncio.create_task(engine.generate(request("a", [0] * 8)))
        await asyncio.sleep(0.5)
        await engine.update_weights(WeightFile(version=1, path="", bytes=0, checksum=""), interrupt)
        cached = 8 + engine.tokens_generated()
        await answer
        return engine.usage.recomputed_tokens, cached

    recomputed, cached = alone(lambda e: main(e, "recompute"), Times(), lambda _: 50)
    assert recomputed == cached > 8
    assert alone(lambda e: main(e, "keep"), Times(), lambda _: 50)[0] == 0


def test_an_answer_longer_than_allowed_is_cut_off_and_says_so() -> None:
    async def main(engine: SimulatedEngine) -> list[Completion]:
        return [await engine.generate(request(f"{n}", [0], max_new_tokens=n)) for n in (9, 10, 11)]

    ended = alone(main, Times(), lambda _: 10)
    assert [(len(c.output_ids), c.finish_reason) for c in ended] == [(9, "length"), (10, "stop"), (10, "stop")]


def test_a_request_that_could_not_fit_into_the_cache_is_refused() -> None:
    async def main(engine: SimulatedEngine) -> None:
        await engine.generate(request("a", [0] * 5, max_new_tokens=6))

    with pytest.raises(RolloutError, match="worker-0: request a: prompt of 5 tokens"):
        alone(main, Times(kv_capacity_tokens=10), lambda _: 3)


def test_long_answers_take_memory_only_for_their_versions_and_share_that() -> None:
    async def main(engine: SimulatedEngine) -> list[Completion]:
        prompt = [0] * 8
        return await asyncio.gather(*(engine.generate(request(f"{n}", prompt, 27_000)) for n in range(64)))

    ended = alone(main, Times(kv_capacity_tokens=4_000_000), lambda _: 27_000)
    arrays = [np.asarray(a) for c in ended for a in (c.output_ids, c.logprobs, c.versions)]
    owned: dict[int, int] = {}
    for array in arrays:
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        owned[id(base)] = base.nbytes
    assert sum(owned.values()) < 400_000  # 64 answers of 27,000 tokens: 20 MB if each had its own


@pytest.mark.parametrize("together", [False, True])
def test_without_interruption_engines_take_new_weights_each_when_its_answers_end_or_all_when_the_last_has(
    together: bool,
) -> None:
    lengths = {"short": 10, "long": 40, "next": 5}

    async def main() -> list[tuple[float, set[int]]]:
        loop, engines = asyncio.get_running_loop(), list[SimulatedEngine]()
        for name in ("one", "two"):
            among = engines if together else None
            engines.append(SimulatedEngine(name, Times(), lambda r: lengths[r.request_id], together=among))

        async def ended(engine: SimulatedEngine, what: str) -> tuple[float, set[int]]:
            versions = (await engine.generate(request(what, [0], max_new_tokens=50))).versions
            return loop.time(), set(np.asarray(versions).tolist())

        first = [asyncio.create_task(ended(e, what)) for e, what in zip(engines, ("short", "long"), strict=True)]
        await asyncio.sleep(0.001)
        weights = WeightFile(version=1, path="", bytes=0, checksum="")
        updates = [asyncio.create_task(e.update_weights(weights, "finish")) for e in engines]
        await first[0]
        await_next = asyncio.create_task(ended(engines[0], "next"))
        await asyncio.gather(*updates)
        return [await first[0], await first[1], await await_next]

    (short, v0), (long, v1), (next_, v2) = run_virtual(main())
    assert (v0, v1, v2) == ({0}, {0}, {1})
    assert short < long
    assert (next_ > long) is together
