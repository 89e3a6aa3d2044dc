"""A process that serves simulated engines over the real wire, for `benchmarks/controller.py`. Its arguments are a
seed, the mean seconds of an answer, and its tokens; it prints its port, and ends with its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys

from _timer_engine import TimerEngine
from aiohttp import web

from fleuve.types import GenerationRequest, PackedCompletion, UpdateRequest, WeightFile, decode, encode

MSGPACK = "application/msgpack"


def application(engine: TimerEngine) -> web.Application:
    """The routes that a controller uses."""

    async def generate(request: web.Request) -> web.Response:
        completion = await engine.generate(decode(await request.read(), GenerationRequest))
        return web.Response(body=encode(PackedCompletion.of(completion)), content_type=MSGPACK)

    async def update_weights(request: web.Request) -> web.Response:
        asked = decode(await request.read(), UpdateRequest)
        weights = WeightFile(version=asked.version, path=asked.path, bytes=asked.bytes, checksum=asked.checksum)
        return web.Response(body=encode(await engine.update_weights(weights, asked.interrupt)), content_type=MSGPACK)

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"version": await engine.health()})

    async def metrics(request: web.Request) -> web.Response:
        return web.json_response(await engine.metrics())

    app = web.Application()
    app.add_routes(
        [
            web.post("/generate", generate),
            web.post("/update_weights", update_weights),
            web.get("/health", health),
            web.get("/metrics", metrics),
        ]
    )
    return app


async def run(seed: int, seconds: float, tokens: int) -> None:
    runner = web.AppRunner(
        application(TimerEngine(seed, seconds, tokens)),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=0.1,
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the benchmark ends
    await runner.cleanup()


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(run(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
