"""The trainer behind HTTP.

All torch work runs in one thread of its own, one call after the other; the event loop stays free to answer `/health`
and `/interrupt` in the middle of a step, and to have what is published broadcast beside it (`train.broadcasting`).

    POST /step?id=  Batch → StepResult            POST /save, /load   {path} → {version}
    POST /publish   {served} → WeightFile         GET  /health        {name, version, busy}
    POST /interrupt {id} → {}

Of several ranks, rank 0 has this server. It answers `/health` before there is a trainer: whoever started the ranks
tells the others what that says of where they meet. They have a small server of their own.

Who may ask is `wire.guard`'s to say; checkpoints are written and read in the directories named at the start alone.

An interruption names the step that it ends by the id that the client gave it. So it counts even if it overtakes the
batch on its way here, and one that comes too late touches no later step.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from fleuve.ending import leave_with
from fleuve.errors import UserError
from fleuve.train.leader import Leader
from fleuve.train.ranks import Meeting
from fleuve.train.trainer import Trainer
from fleuve.types import Batch, StepResult, decode, encode
from fleuve.wire.confine import OutsideError, confined
from fleuve.wire.guard import guard, knows

NAME = "trainer"
MAX_BODY = 8 << 30
"""Bytes: a batch is a few hundred MB when answers are long."""

END_SECONDS = 3.0
"""What a micro-batch, a save or a publication in progress has to end in when the trainer is told to stop."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Publish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    served: int | None = None


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str


class _Interrupt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str


class TrainerServer:
    """Routes requests to `make_trainer()`'s trainer, which is made in the thread that then does all its work.

    Args:
        directories: checkpoints are written and read in these, and nowhere else.
        token: what a request has to show; see `wire.guard`.
        meeting: of several ranks. Then `make_trainer` is not waited for: it needs the others. The process ends if it
            fails.
    """

    def __init__(
        self,
        make_trainer: Callable[[], Trainer | Leader],
        directories: Sequence[Path] = (),
        token: str | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        self._directories = directories
        self._token = token
        self._meeting = meeting
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._making = self._executor.submit(_or_end(make_trainer) if meeting else make_trainer)
        if not meeting:
            self._making.result()
        self._busy = ""
        self._stepping: str | None = None  # the step in progress
        self._interrupted: str | None = None  # the latest to be interrupted, begun or not
        self._latest: Future[Any] | None = None

    @property
    def _trainer(self) -> Trainer | Leader:
        """To be used where there is one: in the thread that made it, or after `_making`."""
        return self._making.result()

    def close(self) -> None:
        """End the step in progress, if any, and take no more work. Returns within END_SECONDS, whatever goes on."""
        if self._making.done():
            self._trainer.interrupted.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._latest is not None:
            wait([self._latest], END_SECONDS)

    def app(self) -> web.Application:
        """The application to serve."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[guard(self._token, _refuse), _errors])
        app.add_routes(
            [
                web.post("/step", self._step),
                web.post("/publish", self._publish),
                web.post("/save", self._save),
                web.post("/load", self._load),
                web.post("/interrupt", self._interrupt),
                web.get("/health", self._health),
            ]
        )
        return app

    async def _step(self, request: web.Request) -> web.Response:
        step = request.query.get("id", "")
        batch = decode(await request.read(), Batch)

        def work() -> StepResult:
            # In this order: whenever an interruption comes in between, `_interrupt` or the last line sees it.
            self._stepping = step
            self._trainer.interrupted.clear()
            if step and step == self._interrupted:
                self._trainer.interrupted.set()
            try:
                return self._trainer.step(batch)
            finally:
                self._stepping = None

        return _packed(await self._run("step", work))

    async def _publish(self, request: web.Request) -> web.Response:
        served = (await _read(request, _Publish)).served
        return _packed(await self._run("publish", lambda: self._trainer.publish(served)))

    async def _save(self, request: web.Request) -> web.Response:
        path = confined((await _read(request, _Place)).path, self._directories)
        await self._run("save", lambda: self._trainer.save(path))
        return web.json_response({"version": self._trainer.version})

    async def _load(self, request: web.Request) -> web.Response:
        path = confined((await _read(request, _Place)).path, self._directories)
        await self._run("load", lambda: self._trainer.load(path))
        return web.json_response({"version": self._trainer.version})

    async def _interrupt(self, request: web.Request) -> web.Response:
        self._interrupted = (await _read(request, _Interrupt)).id
        if self._interrupted == self._stepping:  # so there is a trainer
            self._trainer.interrupted.set()
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.Response:
        if not knows(self._token, request):
            return web.json_response({})
        if not self._making.done():
            return web.json_response(
                {"name": NAME, "busy": "starting", "meeting": asdict(self._meeting) if self._meeting else None}
            )
        return web.json_response({"name": NAME, "version": self._trainer.version, "busy": self._busy})

    async def _run(self, what: str, work: Callable[[], T]) -> T:
        def busy() -> T:
            self._busy = what
            try:
                return work()
            finally:
                self._busy = ""

        self._latest = self._executor.submit(busy)
        return await asyncio.wrap_future(self._latest)


def rank_app(name: str, busy: Callable[[], str], meet: Callable[[Meeting], None], token: str | None) -> web.Application:
    """What a rank other than the first serves: `/health`, and `/meet`, by which it hears where the others are."""

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"name": name, "busy": busy()} if knows(token, request) else {})

    async def met(request: web.Request) -> web.Response:
        meet(await _read(request, Meeting))
        return web.json_response({})

    app = web.Application(middlewares=[guard(token, _refuse), _errors])
    app.add_routes([web.get("/health", health), web.post("/meet", met)])
    return app


def _or_end(make: Callable[[], T]) -> Callable[[], T]:
    """`make`; where it fails, the process ends as `leave_after` says."""

    def made() -> T:
        try:
            return make()
        except Exception as error:
            leave_with(error)

    return made


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What a handler raises, a line of reason: as status 400 or 403 for what the client can mend, else as 500, with the
    traceback too for what may be our fault."""
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except msgspec.DecodeError as error:
        return _refuse(400, f"{request.path}: {error}")
    except OutsideError as error:
        return _refuse(403, f"{request.path}: {error}")
    except Exception as error:
        text = traceback.format_exc()
        print(f"{request.path} failed:\n{text}", file=sys.stderr, flush=True)
        answer = {"error": str(error) or type(error).__name__, "kind": type(error).__name__}
        if not isinstance(error, UserError | OSError):
            answer["traceback"] = text
        return web.json_response(answer, status=500)


def _refuse(status: int, why: str) -> web.Response:
    return web.json_response({"error": why, "kind": "RequestError"}, status=status)


async def _read(request: web.Request, kind: type[T]) -> T:
    """A small body, as JSON."""
    return msgspec.json.decode(await request.read(), type=kind)


def _packed(value: Any) -> web.Response:
    return web.Response(body=encode(value), content_type="application/msgpack")
