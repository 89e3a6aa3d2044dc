"""A served tiny engine in this process, over real HTTP, and what the tests ask of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from tiny_engine import tiny_model

from fleuve.engine.loop import EngineLoop
from fleuve.engine.options import EngineOptions
from fleuve.engine.server import application
from fleuve.engine.service import Service, open_engine
from fleuve.types import Completion, PackedCompletion, WeightFile, WeightUpdate, decode, encode, to_json
from fleuve.weights.store import WeightStore
from fleuve.wire.listen import bind

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
        packed = decode(await self.post("/generate", request), PackedCompletion)
        return msgspec.json.decode(to_json(packed), type=Completion)  # with lists, as a client that takes JSON has it

    async def update(self, file: WeightFile, interrupt: str = "recompute", status: int = 200) -> WeightUpdate:
        body = {f: getattr(file, f) for f in file.__struct_fields__} | {"interrupt": interrupt}
        reply = await self.post("/update_weights", body, status)
        return decode(reply, WeightUpdate) if status == 200 else json.loads(reply)

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(20):
            while (await self.json("/metrics"))["running"] != count:  # noqa: ASYNC110 (it is another side's state)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    model_dir: Path, *, weights: Path | None = None, token: str | None = None, **options: object
) -> AsyncIterator[Client]:
    engine = open_engine(EngineOptions(model=str(model_dir), **options))
    loop = EngineLoop(engine)
    loop.start()
    service = Service(loop, engine.tokenizer, "tiny", str(model_dir), 512, [weights] if weights else [])
    runner = web.AppRunner(
        application(service, token), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    with bind("127.0.0.1", 0) as sock:
        await web.SockSite(runner, sock).start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Client(session, f"http://127.0.0.1:{sock.getsockname()[1]}", service)
        await runner.cleanup()
        await loop.stop()


def publish(store: WeightStore, version: int) -> WeightFile:
    return store.publish(version, tiny_model(1000 + version).named_parameters())
