"""What is sent to an engine by mistake or in bad faith: refused in one line, and it serves on as before."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from served import MSGPACK, serving
from tiny_engine import ask, prompt_of, tiny_model

from fleuve.contracts import RolloutError
from fleuve.launch.process import ChildProcess
from fleuve.rollout.client import EngineClient
from fleuve.types import WeightFile, to_json
from fleuve.weights.store import WeightStore
from fleuve.wire.guard import bearer


def spoilt(store: WeightStore, directory: Path, elsewhere: Path) -> dict[str, tuple[WeightFile, str]]:
    """Weight files with something wrong, and what is said of each."""
    good = store.publish(1, tiny_model(1001).named_parameters())
    content = Path(good.path).read_bytes()

    def file(name: str, content: bytes, **changes: object) -> WeightFile:
        path = directory / name
        path.write_bytes(content)
        return msgspec.structs.replace(good, path=str(path), **changes)

    flipped = bytearray(content)
    flipped[-5] ^= 1
    outside = elsewhere / "weights.safetensors"
    outside.write_bytes(content)
    (directory / "link").symlink_to(outside)
    other = tiny_model(7, hidden_size=32, head_dim=8)
    return {
        "truncated": (file("short", content[:-100]), "bytes, published were"),
        "a flipped bit": (file("flipped", bytes(flipped)), "checksum"),
        "no weights": (file("noise", b"x" * len(content)), "checksum"),
        "missing": (msgspec.structs.replace(good, path=str(directory / "gone")), "does not exist"),
        "another version": (msgspec.structs.replace(good, version=2), "are of version 1"),
        "another model": (store.publish(3, other.named_parameters()), "wrong shape"),
        "a part of the model": (store.publish(4, list(tiny_model(1).named_parameters())[:-2]), "missing"),
        "more than the model": (
            store.publish(5, [*tiny_model(1).named_parameters(), ("extra", tiny_model(1).lm_head.weight)]),
            "unknown: extra",
        ),
        "a file elsewhere": (msgspec.structs.replace(good, path=str(outside)), "is outside of what"),
        "dots": (msgspec.structs.replace(good, path=f"{directory}/../{elsewhere.name}/{outside.name}"), "is outside"),
        "a link that leads out": (msgspec.structs.replace(good, path=str(directory / "link")), "is outside of what"),
        "a relative path": (msgspec.structs.replace(good, path="weights.safetensors"), "give the whole path"),
        "the directory": (msgspec.structs.replace(good, path=str(directory)), "is outside of what"),
    }


async def test_as_a_process_it_refuses_weights_that_are_not_its_own_and_serves_on(
    model_dir: Path, tmp_path: Path
) -> None:
    directory, elsewhere = tmp_path / "weights", tmp_path / "elsewhere"
    elsewhere.mkdir()
    store = WeightStore(directory, keep=10)
    options = {"model": str(model_dir), "name": "w0", "weights": str(directory)}
    child = await ChildProcess.start("w0", "fleuve.engine", options, tmp_path / "log")
    request = ask("a", prompt_of(0, 9), new=12, temperature=0.0)
    try:
        async with EngineClient("w0", child.url, 30.0, 30.0, child.token) as engine:
            before = await engine.generate(request)
            for name, (file, words) in spoilt(store, directory, elsewhere).items():
                with pytest.raises(RolloutError) as refused:
                    await engine.update_weights(file, "recompute")
                assert words in str(refused.value), (name, str(refused.value))
                assert str(refused.value).startswith("w0: the update to version"), name
                assert "\n" not in str(refused.value), name
                assert to_json(await engine.generate(request)) == to_json(before), name
                assert await engine.health() == 0, name
            good = store.publish(1, tiny_model(1001).named_parameters())
            assert (await engine.update_weights(good, "recompute")).version == 1
            after = await engine.generate(request)
            assert (set(after.versions), list(after.output_ids) == list(before.output_ids)) == ({1}, False)
        async with EngineClient("w0", child.url, 30.0, 30.0) as stranger:
            with pytest.raises(RolloutError, match="wants its token"):
                await stranger.generate(request)
    finally:
        await child.stop()
        store.close()


async def test_an_engine_that_was_told_of_no_directory_takes_no_weights(model_dir: Path, store: WeightStore) -> None:
    async with serving(model_dir) as client:
        file = store.publish(1, tiny_model(1001).named_parameters())
        reply = await client.update(file, status=403)
        assert "no directory: none was named at the start" in reply["error"]["message"]  # type: ignore[index]


EVERYTHING = [
    ("POST", "/generate"),
    ("POST", "/update_weights"),
    ("POST", "/abort"),
    ("POST", "/progress"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
]


async def test_with_a_token_nothing_but_the_bare_health_is_told_to_who_does_not_show_it(model_dir: Path) -> None:
    async with serving(model_dir, token="secret") as client:
        for method, path in EVERYTHING:
            async with client.session.request(method, client.url + path, json={}) as response:
                assert response.status == 401, path
                assert (await response.json())["error"]["type"] == "authentication_error"
        assert await client.json("/health") == {"status": "ok"}
        async with client.session.get(client.url + "/health", headers=bearer("secret")) as response:
            assert (await response.json())["version"] == 0
        async with client.session.get(client.url + "/v1/models", headers=bearer("secret")) as response:
            assert response.status == 200


def test_every_route_is_among_those_that_are_tried_without_the_token(model_dir: Path) -> None:
    from fleuve.engine.server import application

    class Service:
        loop = None

    app = application(Service())  # type: ignore[arg-type]
    routes = {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource and r.method != "HEAD"}
    assert routes == {*EVERYTHING, ("GET", "/health")}


async def test_a_web_page_cannot_use_an_engine_on_this_machine(model_dir: Path) -> None:
    async with serving(model_dir) as client:
        for headers in ({"Origin": "https://elsewhere.example"}, {"Host": "elsewhere.example"}):
            async with client.session.post(client.url + "/pause", data="{}", headers=headers) as response:
                assert response.status == 403
        assert (await client.json("/metrics"))["paused"] == 0.0


DEEP = 100_000


@pytest.mark.parametrize("path", ["/generate", "/abort", "/v1/completions", "/v1/chat/completions"])
async def test_a_body_that_is_nested_deeply_or_no_body_at_all_is_refused(model_dir: Path, path: str) -> None:
    bodies = [
        b"[" * DEEP,
        b'{"a":' * DEEP,
        b'{"request_ids":' + b"[" * DEEP,
        b'{"messages":' + b"[" * DEEP,
        b"",
        b"\xff",
    ]
    async with serving(model_dir) as client:
        for body in bodies:
            async with client.session.post(client.url + path, data=body) as response:
                assert response.status == 400, body[:20]
                assert "\n" not in json.loads(await response.read())["error"]["message"]
        for body in [b"\x91" * DEEP, b"\x81\xa1a" * DEEP, b"\xdd\xff\xff\xff\xff", b"\xc1", b""]:
            async with client.session.post(client.url + "/generate", data=body, headers=MSGPACK) as response:
                assert response.status == 400, body[:20]
        assert len((await client.generate(ask("a", prompt_of(0, 9), new=3))).output_ids) == 3


async def test_requests_in_flight_go_on_while_bad_ones_are_refused(model_dir: Path) -> None:
    async with serving(model_dir) as client:
        running = [asyncio.create_task(client.generate(ask(i, prompt_of(i, 9), new=60))) for i in range(4)]
        await client.until_running(4)
        for _ in range(20):
            await client.json("/generate", {"request_id": "x", "input_ids": [10**9], "sampling": {}}, status=400)
        assert [len((await task).output_ids) for task in running] == [60] * 4
