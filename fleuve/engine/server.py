"""The engine over HTTP: the rollout contract (design, section 4.2), with the OpenAI endpoints beside it.

Who may ask is `wire.guard`'s to say; weights are read from one directory alone, that of the engine's options.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from fleuve.engine import openai
from fleuve.engine.engine import RequestError
from fleuve.engine.loop import EngineLoop
from fleuve.engine.options import EngineOptions
from fleuve.engine.parameters import WeightsMismatchError
from fleuve.engine.service import Service, context_of, open_engine
from fleuve.types import (
    AbortRequest,
    GenerationRequest,
    PackedCompletion,
    ProgressRequest,
    UpdateRequest,
    WeightFile,
    decode,
    encode,
    to_json,
)
from fleuve.weights.store import WeightError
from fleuve.wire.confine import OutsideError, confined
from fleuve.wire.guard import guard, knows
from fleuve.wire.open_files import allow_many_connections

MSGPACK = "application/msgpack"
JSON = "application/json"
MAX_BODY = 8 * 2**20  # bytes; a prompt that fills a context of a million tokens, as JSON
SWITCH_INTERVAL = 0.0005  # seconds; Python's 5 ms would let a busy server hold the engine's thread up that long an op

STOP_SECONDS = 0.5  # that the step in progress has to end in when the server is told to stop

T = TypeVar("T")


async def _read(request: web.Request, kind: type[T]) -> T:
    """The body, msgpack or JSON by its Content-Type."""
    body = await request.read()
    if request.content_type in (MSGPACK, "application/x-msgpack"):
        return decode(body, kind)
    return msgspec.json.decode(body, type=kind)


def _reply(request: web.Request, value: Any) -> web.Response:
    """In the format that the client accepts; one that does not say gets the format it sent."""
    accepted = request.headers.get("Accept", "*/*")
    binary = MSGPACK in accepted or (JSON not in accepted and request.content_type == MSGPACK)
    if binary:
        return web.Response(body=encode(value), content_type=MSGPACK)
    return web.Response(body=to_json(value), content_type=JSON)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What went wrong as one line of JSON; 400 for what the client can mend, 403 for a file that it may not name, 409
    for weights that do not fit."""
    try:
        return await handler(request)
    except (RequestError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return _error(400, f"{request.path}: {error}", "invalid_request_error")
    except RecursionError:
        return _error(400, f"{request.path}: the body is nested too deeply", "invalid_request_error")
    except OutsideError as error:
        return _error(403, f"{request.path}: {error}", "permission_error")
    except (WeightError, WeightsMismatchError) as error:
        return _error(409, str(error), "weights_error")
    except web.HTTPRequestEntityTooLarge:
        return _error(413, f"{request.path}: the body is larger than {MAX_BODY} bytes", "invalid_request_error")
    except (web.HTTPException, ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        return _error(500, f"{request.path}: {type(error).__name__}: {error}", "engine_error")


def _error(status: int, message: str, kind: str) -> web.Response:
    line = " ".join(message.split())
    return web.json_response({"error": {"message": line, "type": kind, "code": status}}, status=status)


def _refuse(status: int, why: str) -> web.Response:
    return _error(status, why, "authentication_error" if status == 401 else "permission_error")


def application(service: Service, token: str | None = None) -> web.Application:
    """The routes. Run it with `handler_cancellation=True`, so that a client that goes away aborts its request."""
    loop = service.loop

    async def generate(request: web.Request) -> web.Response:
        completion = await loop.generate(await _read(request, GenerationRequest))
        return _reply(request, PackedCompletion.of(completion))

    async def update_weights(request: web.Request) -> web.Response:
        body = await _read(request, UpdateRequest)
        path = confined(body.path, service.weights)
        file = WeightFile(version=body.version, path=str(path), bytes=body.bytes, checksum=body.checksum)
        invitation = None if body.invitation is msgspec.UNSET else body.invitation
        return _reply(request, await loop.update_weights(file, body.interrupt, invitation))

    async def abort(request: web.Request) -> web.Response:
        body = await _read(request, AbortRequest)
        return _reply(request, {"aborted": await loop.abort(body.request_ids)})

    async def progress(request: web.Request) -> web.Response:
        return _reply(request, await loop.progress((await _read(request, ProgressRequest)).known))

    async def pause(request: web.Request) -> web.Response:
        await loop.pause()
        return _reply(request, {"paused": True})

    async def resume(request: web.Request) -> web.Response:
        await loop.resume()
        return _reply(request, {"paused": False})

    async def health(request: web.Request) -> web.Response:
        if loop.failed.done():
            return _error(500, "the engine has stopped", "engine_error")
        if not knows(token, request):
            return web.json_response({"status": "ok"})
        version = loop.engine.version
        return web.json_response({"status": "ok", "name": service.name, "model": service.model, "version": version})

    async def metrics(request: web.Request) -> web.Response:
        return web.json_response(await loop.metrics())

    app = web.Application(middlewares=[guard(token, _refuse), _errors], client_max_size=MAX_BODY)
    app.add_routes(
        [
            web.post("/generate", generate),
            web.post("/update_weights", update_weights),
            web.post("/abort", abort),
            web.post("/progress", progress),
            web.post("/pause", pause),
            web.post("/resume", resume),
            web.get("/health", health),
            web.get("/metrics", metrics),
            *openai.routes(service),
        ]
    )
    return app


async def run(options: EngineOptions, sock: socket.socket, token: str | None) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; an error that ends the engine's thread is raised here.

    Raises:
        UserError: the model cannot be opened.
    """
    engine = await asyncio.to_thread(open_engine, options)
    sys.setswitchinterval(SWITCH_INTERVAL)
    allow_many_connections()
    loop = EngineLoop(engine)
    loop.start()
    weights = [Path(options.weights)] if options.weights is not None else []
    service = Service(loop, engine.tokenizer, options.name, options.model, context_of(engine.runner.model), weights)
    runner = web.AppRunner(
        application(service, token), handler_cancellation=True, access_log=None, shutdown_timeout=0.2
    )
    await runner.setup()
    await web.SockSite(runner, sock, backlog=1024).start()
    host, port = sock.getsockname()[:2]
    print(f"{options.name}: serving {options.model} (version {options.version}) on http://{host}:{port}", flush=True)

    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
    loop.failed.add_done_callback(lambda _: ended.set())
    await ended.wait()
    if not loop.failed.done():
        with contextlib.suppress(TimeoutError):  # a long step: the thread ends with the process
            await loop.stop(STOP_SECONDS)  # before the server: answers in flight fail at once instead of holding it up
    await runner.cleanup()
    if loop.failed.done():
        loop.failed.result()
