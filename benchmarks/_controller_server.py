"""A process that serves simulated engines over the real wire, for `benchmarks/controller.py`. Its arguments are a
seed, the mean seconds of an answer, and its tokens; it prints its port, and ends with its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import sys

from aiohttp import web

from fleuve.types import Completion, GenerationRequest, UpdateRequest, WeightUpdate, decode, encode

MSGPACK = "application/msgpack"


class Server:
    """One engine: answers of `tokens` tokens, `seconds` each on average."""

    def __init__(self, seed: int, seconds: float, tokens: int) -> None:
        self.version = 0
        self.answers = 0
        self.in_flight = 0
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._ids = [7] * tokens
        self._logprobs = [-1.0] * tokens

    async def generate(self, request: web.Request) -> web.Response:
        asked = decode(await request.read(), GenerationRequest)
        self.in_flight += 1
        try:
            await asyncio.sleep(self._seconds * (0.5 + self._rng.random()))
        finally:
            self.in_flight -= 1
        self.answers += 1
        completion = Completion(
            request_id=asked.request_id,
            output_ids=self._ids,
            logprobs=self._logprobs,
            versions=[self.version] * len(self._ids),
            finish_reason="stop",
        )
        return web.Response(body=encode(completion), content_type=MSGPACK)

    async def update_weights(self, request: web.Request) -> web.Response:
        self.version = decode(await request.read(), UpdateRequest).version
        update = WeightUpdate(version=self.version, interrupted=self.in_flight, seconds=0.0)
        return web.Response(body=encode(update), content_type=MSGPACK)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens_generated": float(self.answers), "running": float(self.in_flight)})


async def run(seed: int, seconds: float, tokens: int) -> None:
    server = Server(seed, seconds, tokens)
    app = web.Application()
    app.add_routes(
        [
            web.post("/generate", server.generate),
            web.post("/update_weights", server.update_weights),
            web.get("/health", server.health),
            web.get("/metrics", server.metrics),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
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
