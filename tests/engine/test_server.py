"""The engine over real HTTP: an aiohttp server in this process, and once as a process of its own."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tiny_engine import ask, prompt_of, run_all, score, tiny_model

from fleuve.engine import loop as loop_module
from fleuve.engine.loop import EngineLoop, EngineStoppedError
from fleuve.engine.options import EngineOptions
from fleuve.engine.server import MAX_BODY, application, bind
from fleuve.engine.service import Service, open_engine
from fleuve.errors import UserError
from fleuve.types import Completion, WeightFile, WeightUpdate, decode, encode, to_json
from fleuve.weights.store import WeightStore

MSGPACK = {"Content-Type": "application/msgpack"}


class Client:
    """What the tests ask of a running server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, service: Service) -> None:
        self.session, self.url, self.service = session, url, service

    async def post(self, path: str, body: object, status: int = 200) -> bytes:
        async with self.session.post(self.url + path, data=encode(body), headers=MSGPACK) as response:
            reply = await response.read()
            assert response.status == status, reply
            return reply

    async def json(self, path: str, body: object = None, status: int = 200) -> dict:
        method = "GET" if body is None else "POST"
        async with self.session.request(method, self.url + path, json=body) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def generate(self, request) -> Completion:
        return decode(await self.post("/generate", request), Completion)

    async def update(self, file: WeightFile, interrupt: str = "recompute", status: int = 200) -> WeightUpdate:
        body = {f: getattr(file, f) for f in file.__struct_fields__} | {"interrupt": interrupt}
        reply = await self.post("/update_weights", body, status)
        return decode(reply, WeightUpdate) if status == 200 else json.loads(reply)

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(20):
            while (await self.json("/metrics"))["running"] != count:  # noqa: ASYNC110 (it is another side's state)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(model_dir: Path, **options: object) -> AsyncIterator[Client]:
    engine = open_engine(EngineOptions(model=str(model_dir), **options))
    loop = EngineLoop(engine)
    loop.start()
    service = Service(loop, engine.tokenizer, "tiny", str(model_dir), 512)
    runner = web.AppRunner(application(service), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    with bind("127.0.0.1", 0) as sock:
        await web.SockSite(runner, sock).start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Client(session, f"http://127.0.0.1:{sock.getsockname()[1]}", service)
        await runner.cleanup()
        await loop.stop()


@pytest.fixture
async def client(model_dir: Path) -> AsyncIterator[Client]:
    async with serving(model_dir) as client:
        yield client


@pytest.fixture
def store(tmp_path: Path):
    store = WeightStore(tmp_path / "weights", keep=10)
    yield store
    store.close()


def publish(store: WeightStore, version: int) -> WeightFile:
    return store.publish(version, tiny_model(1000 + version).named_parameters())


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


async def test_versions_are_stamped_where_tokens_are_sampled(client: Client, store: WeightStore) -> None:
    request = ask("a", prompt_of(0, 9), new=480, seed=3)
    answer = asyncio.create_task(client.generate(request))
    await client.until_running(1)
    updated = await client.update(publish(store, 1))
    assert (updated.version, updated.interrupted) == (1, 1)
    assert (await client.json("/health"))["version"] == 1
    got = await answer
    assert set(got.versions) == {0, 1}
    assert got.interruptions == 1
    for version, model in ((0, tiny_model()), (1, tiny_model(1001))):
        want = score(model, request.input_ids, got.output_ids)
        for p, w, v in zip(got.logprobs, want, got.versions, strict=True):
            assert v != version or p == pytest.approx(w, abs=1e-4)


@pytest.mark.parametrize("order", list(itertools.permutations(["resume", "submit", "update"])))
async def test_resume_submit_and_update_may_come_in_any_order(client: Client, store: WeightStore, order) -> None:
    file = publish(store, 1)
    await client.post("/pause", {})
    await client.post("/pause", {})
    tasks = {}
    for what in order:
        if what == "submit":
            tasks["submit"] = asyncio.create_task(client.generate(ask("a", prompt_of(0, 9), new=50)))
        elif what == "update":
            tasks["update"] = asyncio.create_task(client.update(file))
        else:
            await client.post("/resume", {})
            await client.post("/resume", {})
        if what != order[-1]:
            await asyncio.sleep(0.02)
    updated, answer = await asyncio.wait_for(asyncio.gather(tasks["update"], tasks["submit"]), 20)
    assert updated.version == 1
    if order.index("update") == 0:
        assert set(answer.versions) == {1}
    want = {v: score(m, prompt_of(0, 9), answer.output_ids) for v, m in ((0, tiny_model()), (1, tiny_model(1001)))}
    for t, version in enumerate(answer.versions):
        assert answer.logprobs[t] == pytest.approx(want[version][t], abs=1e-4)


async def test_nothing_is_sampled_while_paused_and_weights_can_be_swapped(client: Client, store: WeightStore) -> None:
    answer = asyncio.create_task(client.generate(ask("a", prompt_of(0, 9), new=400)))
    await client.until_running(1)
    await client.post("/pause", {})
    before = (await client.json("/metrics"))["tokens_generated"]
    updated = await client.update(publish(store, 1))
    await asyncio.sleep(0.1)
    after = await client.json("/metrics")
    assert (after["tokens_generated"], after["paused"], updated.version) == (before, 1.0, 1)
    assert not answer.done()
    await client.post("/resume", {})
    versions = (await answer).versions
    assert versions == [0] * int(before) + [1] * (400 - int(before))


async def test_the_engine_goes_on_while_weights_are_read(client: Client, store: WeightStore, monkeypatch) -> None:
    file, read = publish(store, 1), loop_module.read_weights

    def slowly(weights: WeightFile):
        time.sleep(0.5)
        return read(weights)

    monkeypatch.setattr(loop_module, "read_weights", slowly)
    update = asyncio.create_task(client.update(file))
    first = await client.generate(ask("a", prompt_of(0, 9), new=50))
    assert not update.done()
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


async def test_weights_that_are_not_whole_are_refused_and_the_old_ones_serve_on(client, store, tmp_path: Path) -> None:
    good = publish(store, 1)
    wrong = WeightFile(version=1, path=good.path, bytes=good.bytes, checksum="crc32:00000000")
    assert "checksum" in (await client.update(wrong, status=409))["error"]["message"]
    other = store.publish(2, tiny_model(1, hidden_size=32).named_parameters())
    assert "wrong shape" in (await client.update(other, status=409))["error"]["message"]
    (tmp_path / "empty").touch()
    for path in (tmp_path, tmp_path / "empty"):
        size = path.stat().st_size
        nothing = WeightFile(version=3, path=str(path), bytes=size, checksum="crc32:00000000")
        assert str(path) in (await client.update(nothing, status=409))["error"]["message"]
    answer = await client.generate(ask("a", prompt_of(0, 9)))
    assert set(answer.versions) == {0}
    assert answer.logprobs == pytest.approx(score(tiny_model(), prompt_of(0, 9), answer.output_ids), abs=1e-4)


async def test_an_update_of_kind_finish_returns_when_running_answers_have_ended(client, store) -> None:
    answer = asyncio.create_task(client.generate(ask("a", prompt_of(0, 9), new=300)))
    await client.until_running(1)
    update = await client.update(publish(store, 1), "finish")
    assert (update.version, update.interrupted) == (1, 0)
    assert set((await answer).versions) == {0}


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


async def test_an_aborted_request_answers_and_a_lost_client_aborts(client: Client) -> None:
    kept = asyncio.create_task(client.generate(ask("kept", prompt_of(0, 9), new=500)))
    lost = asyncio.create_task(client.generate(ask("lost", prompt_of(1, 9), new=500)))
    await client.until_running(2)
    lost.cancel()
    await client.until_running(1)
    again = asyncio.create_task(client.generate(ask("lost", prompt_of(1, 9), new=5)))  # the id is free again
    assert decode(await client.post("/abort", {"request_ids": ["kept", "unknown"]}), dict) == {"aborted": 1}
    answer = await kept
    assert answer.finish_reason == "abort"
    assert len(answer.output_ids) == len(answer.logprobs) < 500
    assert (await again).finish_reason == "length"


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


# --- OpenAI ---------------------------------------------------------------------------------------------------------


async def sse(client: Client, path: str, body: dict) -> list[dict]:
    """The events of a streamed answer, the closing [DONE] checked."""
    async with client.session.post(client.url + path, json=body | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        lines = [x.removeprefix("data: ") for x in (await response.text()).split("\n\n") if x]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_completions_answers_text_with_usage_and_a_choice_for_each_sample(client: Client) -> None:
    tokenizer = client.service.tokenizer
    body = {"prompt": "12+3*4?", "max_tokens": 25, "n": 3, "seed": 8, "logprobs": 1, "ignore_eos": True}
    reply = await client.json("/v1/completions", body)
    assert reply["usage"] == {"prompt_tokens": 7, "completion_tokens": 75, "total_tokens": 82}
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    for choice in reply["choices"]:
        ids = tokenizer.encode("12+3*4?")
        own = await client.generate(ask("x", ids, new=25, seed=8 + choice["index"]))
        assert choice["text"] == tokenizer.decode(own.output_ids, skip_special_tokens=True)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own.logprobs, abs=1e-4)
        assert choice["finish_reason"] == "length"


async def test_a_streamed_answer_is_the_whole_one_in_pieces(client: Client) -> None:
    body = {"prompt": ["1+1?", "2+2?"], "max_tokens": 40, "n": 2, "seed": 8, "stop": ["7", "ab"], "logprobs": 1}
    whole = await client.json("/v1/completions", body)
    events = await sse(client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        pieces = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
        assert "".join(p["text"] for p in pieces) == choice["text"]
        assert [p["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        tokens = [t for p in pieces for t in p["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]


async def test_a_stop_string_is_cut_off_the_text(client: Client) -> None:
    body = {"prompt": "1+1?", "max_tokens": 60, "seed": 5, "ignore_eos": True}
    free = (await client.json("/v1/completions", body))["choices"][0]["text"]
    stop = free[20:23]
    stopped = (await client.json("/v1/completions", body | {"stop": stop}))["choices"][0]
    assert stopped["text"] == free[: free.index(stop)]
    assert stopped["finish_reason"] == "stop"


async def test_chat_goes_through_the_template_and_streams(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 30, "seed": 5, "logprobs": True}
    reply = await client.json("/v1/chat/completions", body)
    message = reply["choices"][0]["message"]
    ids = client.service.tokenizer.encode("user: 1+1?;assistant: ")
    own = await client.generate(ask("x", ids, new=30, seed=5, ignore_eos=False))
    assert message == {
        "role": "assistant",
        "content": client.service.tokenizer.decode(own.output_ids, skip_special_tokens=True),
    }
    assert reply["usage"]["prompt_tokens"] == len(ids)
    assert len(reply["choices"][0]["logprobs"]["content"]) == len(own.output_ids)
    events = await sse(client, "/v1/chat/completions", body)
    assert "".join(e["choices"][0]["delta"]["content"] for e in events) == message["content"]
    assert (await client.json("/v1/models"))["data"][0]["id"] == client.service.model


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": "1", "presence_penalty": 0.5}, "presence_penalty is not supported"),
        ("/v1/completions", {"prompt": "1", "model": "gpt"}, "'gpt' is not served here"),
        ("/v1/completions", {}, "prompt is missing"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 600}, "context is 512"),
        ("/v1/completions", {"prompt": "1", "logprobs": 5}, "no alternatives"),
        (
            "/v1/completions",
            {"prompt": "1", "n": 300_000, "max_tokens": 1},
            "n is 300000: it must be at least 1 and at",
        ),
        ("/v1/completions", {"prompt": "1", "n": 0}, "n is 0"),
        ("/v1/completions", {"prompt": ["1"] * 1025}, "1025 prompts times n are more than 1024"),
        ("/v1/completions", {"prompt": ["1"] * 9, "n": 128}, "9 prompts times n are more than 1024"),
        ("/v1/completions", {"prompt": "1" * 100_000}, "context is 512"),
        ("/v1/completions", {"prompt": "1", "stop": ["x"] * 100_000}, "stop may be 16 strings"),
        ("/v1/completions", {"prompt": "1", "stop": "x" * 100_000}, "256 characters at most"),
        ("/v1/completions", {"prompt": "1", "logit_bias": {"5": 1}}, "logit_bias is not supported"),
        (
            "/v1/completions",
            {"prompt": "1", "temprature": 0.1},
            "temprature is not a field that this engine knows; did",
        ),
        ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function"}]}, "tools is not supported"),
        ("/v1/chat/completions", {"messages": [], "tool_choice": "required"}, "tool_choice is not supported"),
        ("/v1/chat/completions", {"messages": [], "reasoning_effort": "low"}, "reasoning_effort is not a field"),
        ("/v1/chat/completions", {"messages": []}, "messages is missing"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ],
)
async def test_what_openai_s_clients_may_not_ask_is_said_by_name(client: Client, path, body, words) -> None:
    assert words in (await client.json(path, body, status=400))["error"]["message"]


async def test_what_has_no_effect_in_openai_s_standard_is_accepted(client: Client) -> None:
    plain = {"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 5, "seed": 1}
    idle = {"user": "me", "metadata": {"a": "b"}, "store": True, "stream_options": {"include_usage": True}}
    idle |= {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True, "presence_penalty": 0, "logit_bias": None}
    replies = [await client.json("/v1/chat/completions", plain | more) for more in ({}, idle)]
    assert replies[0]["choices"] == replies[1]["choices"]


async def test_no_request_holds_up_the_others(client: Client) -> None:
    """Requests of large sizes, allowed and refused, while a small one is asked again and again."""
    large = [
        {"prompt": "1", "n": 128, "max_tokens": 100, "ignore_eos": True, "logprobs": 1},
        {"prompt": ["12+3*4?"] * 1024, "max_tokens": 1},
        {"prompt": "7" * 2**20},
        {"prompt": [7] * (MAX_BODY // 2 - 100)},
        {"prompt": "1", "n": 300_000, "max_tokens": 1},
        {"prompt": "1", "stop": ["x" * 100] * 50_000},
    ]
    bodies = [json.dumps(body, separators=(",", ":")).encode() for body in large]

    async def ask_large(body: bytes) -> int:
        async with client.session.post(client.url + "/v1/completions", data=body) as response:
            await response.read()
            return response.status

    asking = asyncio.gather(*map(ask_large, bodies))
    slowest = 0.0
    while not asking.done():
        asked = time.monotonic()
        await client.json("/health")
        slowest = max(slowest, time.monotonic() - asked)
        await asyncio.sleep(0.005)
    assert await asking == [200, 200, 400, 400, 400, 400]
    assert slowest < 1.0


@pytest.mark.parametrize("path", ["/generate", "/update_weights", "/v1/completions"])
async def test_a_body_that_is_too_large_is_refused(client: Client, path: str) -> None:
    async with client.session.post(client.url + path, data=b" " * (MAX_BODY + 1)) as response:
        assert response.status == 413
        assert f"larger than {MAX_BODY} bytes" in (await response.json())["error"]["message"]


# --- processes ------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


def test_a_model_directory_without_tokenizer_or_without_model_is_one_clear_line(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="has no tokenizer"):
        open_engine(EngineOptions(model=str(tmp_path / "bare")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot open the model") as caught:
        open_engine(EngineOptions(model=str(tmp_path / "empty")))
    assert "\n" not in str(caught.value)


def test_as_a_process_it_serves_on_the_socket_it_was_given_and_ends_on_sigterm(model_dir: Path) -> None:
    with bind("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "fleuve.engine", json.dumps({"model": str(model_dir), "version": 7, "name": "w0"})],
            pass_fds=[sock.fileno()],
            env=os.environ | {"FLEUVE_SOCKET_FD": str(sock.fileno())},
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        with urllib.request.urlopen(url + "/health", timeout=60) as reply:  # waits in the backlog until it serves
            assert json.load(reply) == {"status": "ok", "name": "w0", "model": str(model_dir), "version": 7}
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert out.startswith("w0: serving")
    finally:
        process.kill()


def test_as_a_process_it_ends_within_a_second_of_sigterm_with_connections_and_answers_open(model_dir: Path) -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "fleuve.engine", json.dumps({"model": str(model_dir)})],
            pass_fds=[sock.fileno()],
            env=os.environ | {"FLEUVE_SOCKET_FD": str(sock.fileno())},
            stdout=subprocess.DEVNULL,
        )
    try:
        idle, asking = (http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(2))
        idle.request("GET", "/health")
        assert idle.getresponse().read()  # kept alive
        asking.request("POST", "/pause")
        assert asking.getresponse().read()
        asking.request("POST", "/generate", encode(ask("a", prompt_of(0, 9))), MSGPACK)
        time.sleep(0.2)
        told = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - told < 1.0
    finally:
        process.kill()


def test_as_a_process_it_refuses_unknown_options_with_exit_code_2() -> None:
    command = [sys.executable, "-m", "fleuve.engine", '{"model": "x", "treads": 1}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "treads" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
