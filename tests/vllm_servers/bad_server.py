"""A server that speaks as vLLM does, but for what a test has it say; it has no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def token(logprob: float = 0.0, ident: int = 5) -> dict[str, Any]:
    return {"token_ids": [ident], "logprobs": {"content": [{"token_id": ident, "logprob": logprob}]}}


class BadServer:
    """`said` has the paths that were asked for, in order. `instead` replaces what is done on a path; `tokens` is how
    many an answer has, `pause` the seconds between two."""

    def __init__(self) -> None:
        self.url = ""
        self.said: list[str] = []
        self.instead: dict[str, Handler] = {}
        self.label = "default"
        self.tokens = 3
        self.pause = 0.0
        self.breaks_off = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.said.append(request.path)
        if (handler := self.instead.get(request.path)) is not None:
            return await handler(request)
        match request.path:
            case "/collective_rpc":
                return web.json_response({"results": [{"version": None, "whole": True}]})
            case "/v1/models":
                return web.json_response({"data": [{"id": "m", "max_model_len": 64}]})
            case "/weight_info":
                return web.json_response({"weight_version": self.label})
            case "/finish_weight_update":
                self.label = (await request.json())["weight_version"]
                return web.json_response({})
            case "/metrics":
                return web.Response(text="vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")
            case "/inference/v1/generate":
                return await self.generate(request)
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.json_response({"choices": [token()]})
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(self.tokens):
            last = number == self.tokens - 1
            spans = [{"version": self.label, "start": 0, "end": self.tokens}] if last else None
            choice = token(-0.5) | {"finish_reason": "length" if last else None, "weight_versions": spans}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(self.pause)
            if self.breaks_off:
                assert request.transport is not None
                request.transport.abort()
                return response
        await response.write(b"data: [DONE]\n\n")
        return response


def fails(status: int, message: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status)

    return handler


def says(reply: object) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(reply)

    return handler


async def shows_a_page(request: web.Request) -> web.StreamResponse:
    page = "<!DOCTYPE HTML>\n<html><head><title>Error response</title></head><body>Nothing is here.</body></html>"
    return web.Response(text=page, status=404, content_type="text/html")


async def wants_a_token(request: web.Request) -> web.StreamResponse:
    """Another one than the client's."""
    message = "this server wants its token, as the header Authorization: Bearer TOKEN"
    return web.json_response({"error": {"message": message}}, status=401)


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


@asynccontextmanager
async def speaking_badly() -> AsyncIterator[BadServer]:
    server = BadServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    host, port = site._server.sockets[0].getsockname()[:2]  # type: ignore[attr-defined]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
