"""The rollout contract over real HTTP: an aiohttp server in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from served import Client, publish
from tiny_engine import ask, prompt_of, run_all, score, tiny_model

from fleuve.engine import loop as loop_module
from fleuve.engine.loop import EngineLoop, EngineStoppedError
from fleuve.engine.options import EngineOptions
from fleuve.engine.service import open_engine
from fleuve.types import WeightFile, to_json
from fleuve.weights.store import WeightStore


async def test_generate_answers_in_msgpack_or_json_as_asked(client: Client, model_dir: Path) -> None:
    request = ask("a", prompt_of(0, 9), new=20, seed=3)
    packed = await client.generate(request)
    async with client.session.post(
        client.url + "/generate", data=to_json(request), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.content_type == "application/json"
        plain = await response.json()
    assert plain["output_ids"] == packed.output_ids
    assert packed.logprobs == pytest.approx(score(tiny_model(), request.input_ids, packed.output_ids), abs=1e-4)
    assert packed.request_id == "a"


async def test_many_requests_at_once_are_batched_and_each_gets_its_own_answer(client: Client) -> None:
    requests = [ask(i, prompt_of(i, 5 + i), new=60, seed=i) for i in range(40)]
    answers = await asyncio.gather(*(client.generate(r) for r in requests))
    reference = run_all(open_engine(EngineOptions(model=client.service.model)), requests)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.output_ids == reference[request.request_id].output_ids
    metrics = await client.json("/metrics")
    assert metrics["tokens_generated"] == 40 * 60
    assert metrics["steps"] < 40 * 60 / 8
    assert (metrics["running"], metrics["waiting"]) == (0, 0)
    assert metrics["busy_seconds"] > 0


async def test_bad_requests_get_one_clear_line(client: Client) -> None:
    too_long = await client.post("/generate", ask("a", prompt_of(0, 9), new=5000), status=400)
    assert "at most max_new_tokens 503" in json.loads(too_long)["error"]["message"]
    nonsense = await client.json("/generate", {"request_id": "a", "input_ids": "text"}, status=400)
    assert "input_ids" in nonsense["error"]["message"]
    assert "\n" not in nonsense["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"request_id": "a", "input_ids": [5], "sampling": {"max_new_tokens": 1, "temprature": 0}}),
        ("/generate", {"request_id": "a", "input_ids": [5], "sampling": {"max_new_tokens": 1}, "temprature": 0}),
        ("/abort", {"request_ids": [], "temprature": 0}),
        ("/update_weights", {"version": 1, "path": "", "bytes": 0, "checksum": "", "temprature": 0}),
    ],
)
async def test_an_unknown_field_is_refused_by_name(client: Client, path: str, body: dict) -> None:
    assert "temprature" in (await client.json(path, body, status=400))["error"]["message"]
    assert b"temprature" in await client.post(path, body, status=400)


async def test_the_engine_goes_on_while_weights_are_read(client: Client, store: WeightStore, monkeypatch) -> None:
    file, read, go_on = publish(store, 1), loop_module.read_weights, threading.Event()

    def slowly(weights: WeightFile):
        assert go_on.wait(60)
        return read(weights)

    monkeypatch.setattr(loop_module, "read_weights", slowly)
    update = asyncio.create_task(client.update(file))
    first = await client.generate(ask("a", prompt_of(0, 9), new=50))
    assert not update.done()
    go_on.set()
    assert set(first.versions) == {0}
    assert (await update).version == 1


async def test_a_retried_update_joins_the_first_and_a_repeated_one_changes_nothing(client, store, monkeypatch) -> None:
    file, reads, read = publish(store, 1), [], loop_module.read_weights
    monkeypatch.setattr(loop_module, "read_weights", lambda weights: (reads.append(weights), read(weights))[1])
    answer = asyncio.create_task(client.generate(ask("a", prompt_of(0, 9), new=400)))
    await client.until_running(1)
    await asyncio.gather(client.update(file), client.update(file))
    await client.update(file)
    assert (await answer).interruptions == 1
    assert len(reads) == 1


async def test_an_update_of_kind_finish_that_meets_a_pause_lands_after_it_and_no_answer_mixes(client, store) -> None:
    """While paused nothing can finish, so it waits for `resume`; a client that gave up joins it by asking again."""
    begun = asyncio.create_task(client.generate(ask("a", prompt_of(0, 9), new=300)))
    await client.until_running(1)
    await client.post("/pause", {})
    file = publish(store, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.update(file, "finish"), 0.3)
    later = asyncio.create_task(client.generate(ask("b", prompt_of(1, 9), new=20)))
    again = asyncio.create_task(client.update(file, "finish"))
    await asyncio.sleep(0.1)
    assert not again.done()
    await client.post("/resume", {})
    assert (await asyncio.wait_for(again, 20)).version == 1
    assert set((await begun).versions) == {0}
    assert set((await later).versions) == {1}


async def test_a_paused_engine_that_has_begun_nothing_takes_an_update_of_kind_finish_at_once(client, store) -> None:
    await client.post("/pause", {})
    waiting = asyncio.create_task(client.generate(ask("a", prompt_of(0, 9), new=20)))
    await asyncio.sleep(0.05)
    assert (await asyncio.wait_for(client.update(publish(store, 1), "finish"), 20)).version == 1
    await client.post("/resume", {})
    assert set((await waiting).versions) == {1}


async def test_a_late_result_of_a_cancelled_request_is_not_given_to_its_successor(model_dir: Path) -> None:
    engine = open_engine(EngineOptions(model=str(model_dir)))
    step, stepped, go_on = engine.step, threading.Event(), threading.Event()

    def held_after_the_step():
        outcome = step()
        stepped.set()
        go_on.wait(20)
        return outcome

    engine.step = held_after_the_step  # type: ignore[method-assign]
    loop = EngineLoop(engine)
    loop.start()
    first = asyncio.create_task(loop.generate(ask("a", prompt_of(0, 9), new=1)))
    assert await asyncio.to_thread(stepped.wait, 20)
    first.cancel()
    await asyncio.wait({first})
    second = asyncio.create_task(loop.generate(ask("a", prompt_of(0, 9), new=5)))
    await asyncio.sleep(0)
    go_on.set()
    assert len((await asyncio.wait_for(second, 20)).output_ids) == 5
    await loop.stop()


async def test_a_fault_in_the_engine_fails_every_request_at_once(model_dir: Path) -> None:
    engine = open_engine(EngineOptions(model=str(model_dir)))
    loop = EngineLoop(engine)
    loop.start()
    request = asyncio.create_task(loop.generate(ask("a", prompt_of(0, 9), new=500)))
    await asyncio.sleep(0.05)
    engine.runner.model = None  # type: ignore[assignment]
    with pytest.raises(EngineStoppedError):
        await asyncio.wait_for(request, 10)
    with pytest.raises(EngineStoppedError):
        await loop.metrics()
    with pytest.raises(EngineStoppedError):
        await loop.generate(ask("b", prompt_of(0, 9)))
    assert loop.failed.exception() is not None
