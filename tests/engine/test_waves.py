"""What arrives during a pause is computed in a course of its own, whatever order it arrived in."""

import asyncio
import random

import pytest
from tiny_engine import ask, engine_of, tiny_model

from fleuve.engine.engine import natural
from fleuve.engine.loop import EngineLoop
from fleuve.types import Completion, GenerationRequest


async def answers(loop: EngineLoop, requests: list[GenerationRequest]) -> list[Completion]:
    """Of requests that all come while the engine is paused, in their order."""
    await loop.pause()
    asked = [asyncio.create_task(loop.generate(request)) for request in requests]
    while (await loop.metrics())["waiting"] < len(requests):
        pass
    await loop.resume()
    done = await asyncio.gather(*asked)
    return sorted(done, key=lambda c: natural(c.request_id))


@pytest.mark.parametrize("seed", range(3))
async def test_the_answers_are_the_same_to_the_last_bit_whenever_each_arrived_and_whatever_came_before(seed):
    rng = random.Random(seed)
    lengths = [rng.randrange(3, 40) for _ in range(14)]
    requests = [ask(f"{i // 2}/{i % 2}", [5, 6, 7, 8 + i // 2], n, seed=i) for i, n in enumerate(lengths)]
    courses = []
    for before in (0, 9):
        loop = EngineLoop(engine_of(tiny_model(), max_running=10))
        loop.start()
        if before:  # an engine with a history: rows and slabs have been used
            others = [loop.generate(ask(f"x{i}", [9] * (i + 3), 60, seed=i)) for i in range(before)]
            await asyncio.gather(*others)
        shuffled = rng.sample(requests, len(requests))
        courses.append(await answers(loop, shuffled))
        await loop.stop()
    one, other = courses
    assert [c.output_ids for c in one] == [c.output_ids for c in other]
    assert [c.logprobs for c in one] == [c.logprobs for c in other]


def test_ids_are_ordered_as_people_count():
    assert sorted(["10/0", "9/1", "9/10", "9/2"], key=natural) == ["9/1", "9/2", "9/10", "10/0"]
