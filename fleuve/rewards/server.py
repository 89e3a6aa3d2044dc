"""`fleuve rewards serve`: the pool of verifier processes behind HTTP, for runs on other machines."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
from aiohttp import web

from fleuve.config.settings import RewardSettings
from fleuve.errors import UserError
from fleuve.rewards.code.options import PATIENCE
from fleuve.rewards.door import Door
from fleuve.rewards.pool import RewardPool
from fleuve.rewards.weighted import names
from fleuve.rewards.wire import MSGPACK, TOKEN_VARIABLE, Health, ScoreRequest
from fleuve.types import Prompt, decode, encode
from fleuve.wire.guard import guard, take_token

MAX_BODY = 64 * 2**20
"""Bytes of one check."""


def application(
    pool: RewardPool, settings: RewardSettings, verifiers: Sequence[str], token: str | None = None
) -> web.Application:
    """The routes. Run it with `handler_cancellation=True`, so that a client that goes away gives its place up.

    Only `verifiers` are run: a name is otherwise an invitation to import anything. With a `token`, every request has
    to bring it.
    """
    allowed = frozenset(verifiers)
    # Bodies are read in here only: what waits outside lies in the clients' memory.
    door = Door(settings.queue_size, int(settings.queue_mb * 2**20))

    def refuse(status: int, why: str) -> web.Response:
        another = f"the service wants another token: set {TOKEN_VARIABLE} to it"
        return web.Response(status=status, text=another if status == 401 else why)

    async def score(request: web.Request) -> web.Response:
        size = request.content_length
        if size is None:
            return web.Response(status=411, text="a Content-Length is needed")
        if size > MAX_BODY:
            return web.Response(status=413, text=f"a check of {size} bytes; the most is {MAX_BODY}")
        until = asyncio.get_running_loop().time() + settings.queue_timeout
        if not await door.enter(size, until):
            return web.Response(status=503, text=f"the queue was full for {settings.queue_timeout:g} s")
        try:
            check = decode(await request.read(), ScoreRequest)
            if unknown := [n for n in names([check.verifier]) if n not in allowed and not n.startswith("`")]:
                return web.Response(status=400, text=f"no verifier {unknown[0]!r} here, only {_list(verifiers)}")
            prompt = Prompt(
                id=check.id, input_ids=[], text="", answer=check.answer, verifier=check.verifier, row=check.row
            )
            verdict = await pool.score(prompt, check.text)
        except (msgspec.DecodeError, ValueError, RecursionError, UserError) as error:
            return web.Response(status=400, text=f"this is no check: {error}")
        finally:
            door.leave(size)
        if verdict.score is None and not pool.able:
            return web.Response(status=503, text=verdict.reason)
        return web.Response(body=encode(verdict), content_type=MSGPACK)

    async def health(request: web.Request) -> web.Response:
        if not pool.able:
            return web.Response(status=503, text="no verifier process can be started")
        longest = settings.deadline * (PATIENCE if "code" in allowed else 1.0)
        there = Health(verifiers=list(verifiers), workers=settings.workers, deadline=longest)
        return web.Response(body=msgspec.json.encode(there), content_type="application/json")

    async def metrics(request: web.Request) -> web.Response:
        return web.json_response(pool.metrics())

    app = web.Application(middlewares=[guard(token, refuse, open_to_all=())], client_max_size=MAX_BODY)
    app.add_routes([web.post("/score", score), web.get("/health", health), web.get("/metrics", metrics)])
    return app


async def run(
    settings: RewardSettings, verifiers: Sequence[str], sock: socket.socket, log_path: Path | None = None
) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT. The token is the environment's; verifiers do not get to see it.

    Raises:
        UserError: a verifier cannot be loaded, or others than this machine can reach the socket and there is no token.
        CrashError: a process did not start.
    """
    token = take_token(sock, TOKEN_VARIABLE)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with RewardPool(settings, verifiers, log_path) as pool:
        app = application(pool, settings, verifiers, token)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        try:
            await web.SockSite(runner, sock, backlog=1024).start()
            host, port = sock.getsockname()[:2]
            who = "everyone on this machine" if token is None else "who knows the token"
            what = f"{_list(verifiers)} in {settings.workers} processes, for {who}"
            print(f"rewards: scoring {what}, on http://{host}:{port}", flush=True)
            await ended.wait()
        finally:
            await runner.cleanup()


def _list(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
