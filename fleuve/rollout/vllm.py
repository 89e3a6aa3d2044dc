"""A vLLM server as a rollout worker: the contract of the design's section 4.2 over vLLM's own HTTP interface.

The server runs with Fleuve's extension (`fleuve.vllm`) and with the options that docs/vllm.md lists. An update is
atomic: the weights are read and verified beside the running engine, then it is paused, swapped and resumed. Where
anything goes wrong in between, it stays paused: nothing samples with weights that are half of one version.

Versions come from the server's `spans` of tokens by the label of the weights; or, where a server has none (or
`versions="pieces"`), an update aborts what is in flight, and each answer goes on behind the tokens it has: no piece is
in flight across an update, so each is of the version that it was sent under.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.rollout import vllm_wire as wire
from fleuve.rollout.vllm_flight import Flight, Piece, StopWatch
from fleuve.rollout.vllm_http import Server
from fleuve.rollout.vllm_meeting import meet
from fleuve.types import Completion, GenerationRequest, Interrupt, Invitation, Progress, WeightFile, WeightUpdate

Versions = Literal["auto", "spans", "pieces"]

ARRIVAL = 5.0
"""Seconds for requests on their way to arrive, and for the ends of aborted ones to come."""
AGAIN = 0.25
"""Seconds until an abort is repeated: a request may have arrived, and not be among those that can be aborted yet."""
RECEIVED = 0.05
"""Seconds between two questions whether a broadcast is over."""
LABEL_PATIENCE = 1.0
"""Seconds in which the engine is to say which weights it has; one in a long step is taken at its server's word."""


def _no_watch(request: GenerationRequest) -> StopWatch | None:
    return None


class VllmEngine:
    """Implements `contracts.ContinuingEngine`; calls have deadlines, and fail with a RolloutError naming the worker.

    `version` is that of the weights that the server was started with. `watch` finds stop strings across pieces.
    """

    def __init__(
        self,
        name: str,
        url: str,
        request_timeout: float,
        update_timeout: float,
        token: str | None = None,
        *,
        version: int = 0,
        versions: Versions = "auto",
        watch: Callable[[GenerationRequest], StopWatch | None] = _no_watch,
    ) -> None:
        self.name = name
        self.version = version
        """That the server samples with, as far as this client has seen to it."""
        self.seats = 0
        """In how many processes it takes broadcasts; 0: it takes none."""
        self._initial = version
        self._request_timeout = request_timeout
        self._update_timeout = update_timeout
        self._versions = versions
        self._watch = watch
        self._server = Server(name, url, update_timeout, token)
        self._spans = versions != "pieces"
        self._labelled = True
        self._context: int | None = None
        self._flights: dict[str, Flight] = {}
        self._names = (f"{uuid.uuid4().hex[:12]}-{number}" for number in itertools.count())
        self._loaded: WeightFile | None = None
        self._updates: dict[WeightFile, asyncio.Task[WeightUpdate]] = {}
        self._turn = asyncio.Lock()  # updates, one after the other
        self._switch = asyncio.Lock()  # whoever pauses and resumes the server
        self._open = asyncio.Event()  # requests may be sent
        self._open.set()
        self._running = asyncio.Event()  # not paused by `pause`
        self._running.set()
        self._swapping = False
        self._broken = asyncio.Event()
        self._why = ""

    async def __aenter__(self) -> VllmEngine:
        """
        Raises:
            RolloutError: nobody is there, or the server cannot be a rollout worker: see `vllm_meeting.meet`.
        """
        await self._server.__aenter__()
        try:
            able = await meet(self._server)
        except BaseException:
            await self._server.__aexit__()
            raise
        self._context, self._labelled, self.seats = able.context, able.spans, able.seats
        self.version = self._initial if able.version is None else able.version
        if self._versions == "spans" and not able.spans:
            raise RolloutError(f'{self.name}: the server labels no weights: rollout.vllm.versions is to be "pieces"')
        self._spans = able.spans and self._versions != "pieces"
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._updates.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.__aexit__()

    # --- answers ----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        what = f"request {request.request_id}"
        if why := wire.refusal(request, self._context):
            raise RolloutError(f"{self.name}: {what}: {why}")
        if request.request_id in self._flights:
            raise RolloutError(f"{self.name}: {what}: request_id {request.request_id!r} is already in use")
        flight = self._flights[request.request_id] = Flight(request)
        try:
            async with asyncio.timeout(self._request_timeout):
                while flight.finish is None:
                    await _either(self._open, flight.aborted, self._broken)
                    if self._broken.is_set():
                        raise RolloutError(f"{self.name}: {what} failed: {self._why}")
                    if flight.aborted.is_set():
                        flight.finish = "abort"
                    else:
                        await self._piece(flight, what)
        except TimeoutError:
            raise RolloutError(f"{self.name}: no answer to {what} within {self._request_timeout:g} s") from None
        except wire.WireError as error:
            raise RolloutError(f"{self.name}: {what} failed: {error}") from error
        finally:
            del self._flights[request.request_id]
        return flight.completion()

    async def _piece(self, flight: Flight, what: str) -> None:
        """One request to the server: until the answer has ended, or an update has cut it."""
        piece = flight.board(next(self._names), self.version, self._watch)
        reading = asyncio.ensure_future(self._read(flight, piece, what))
        try:
            await _either(piece.left, self._broken, reading)
            if self._broken.is_set():
                raise RolloutError(f"{self.name}: {what} failed: {self._why}")
            if reading.done():
                flight.close(*reading.result(), self._initial, self._spans)
            else:
                flight.leave()
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await reading
            piece.ended.set()

    async def _read(self, flight: Flight, piece: Piece, what: str) -> tuple[str, list[wire.Span] | None]:
        """Take the tokens of the stream; the reason for its end, and the spans."""
        body = wire.body(flight.request, flight.begun, piece.wire_id, f"fleuve-{piece.version}")
        reason: str | None = None
        spans: list[wire.Span] | None = None
        stopping = False
        async with self._server.exchange("POST", "/inference/v1/generate", body, what) as response:
            piece.arrived.set()
            async for choice in wire.choices(response.content.iter_any()):
                if flight.take(choice) and not stopping:
                    stopping = True
                    await self._abort_pieces([piece])
                reason, spans = choice.finish_reason or reason, choice.weight_versions or spans
        if reason is None:
            raise WorkerLostError(f"{self.name}: connection lost during {what}: its stream broke off")
        return reason, spans

    async def abort(self, request_ids: Sequence[str]) -> None:
        flights = [flight for i in request_ids if (flight := self._flights.get(i)) is not None]
        for flight in flights:
            flight.aborted.set()
        await self._end([flight.piece for flight in flights if flight.piece is not None])

    async def _end(self, pieces: Sequence[Piece]) -> None:
        """Have the server end these; one that does not is left, with what has come of it."""
        deadline = asyncio.get_running_loop().time() + ARRIVAL
        while pieces := [piece for piece in pieces if not piece.ended.is_set()]:
            if asyncio.get_running_loop().time() >= deadline:
                for piece in pieces:
                    piece.left.set()
                break
            await self._abort_pieces(pieces)
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN):
                    await asyncio.gather(*(piece.ended.wait() for piece in pieces))

    async def _abort_pieces(self, pieces: Sequence[Piece]) -> None:
        ids = [f"generate-tokens-{piece.wire_id}" for piece in pieces]  # as the server calls them
        await self._server.post("/inference/v1/abort_requests", {"request_ids": ids}, "abort")

    async def progress(self, known: Mapping[str, int]) -> list[Progress]:
        """What has come of answers in flight beyond the tokens known of each, as far as their versions are certain: of
        an answer that an update has met (`spans`), the tokens before it, until it has ended."""
        return [self._flights[i].progress(count) for i, count in known.items() if i in self._flights]

    # --- weights ----------------------------------------------------------------------------------------------------

    async def update_weights(
        self, weights: WeightFile, interrupt: Interrupt, invitation: Invitation | None = None
    ) -> WeightUpdate:
        """Read (or receive, by `invitation`), verify and swap in new weights. An update that is repeated, or older than
        what is loaded already, changes nothing and is acknowledged. One that is refused leaves the old weights in use;
        one that fails half-way leaves the server paused for good."""
        if self._has(weights):
            return WeightUpdate(version=self.version, interrupted=0, seconds=0.0)
        task = self._updates.get(weights)
        if task is None:
            task = self._updates[weights] = asyncio.create_task(self._update(weights, interrupt, invitation))
            task.add_done_callback(lambda done: self._updated(weights, done))
        return await asyncio.shield(task)  # a caller that goes away does not undo it, one that retries joins it

    def _updated(self, weights: WeightFile, done: asyncio.Task[WeightUpdate]) -> None:
        self._updates.pop(weights, None)
        if not done.cancelled():
            done.exception()  # whoever asked may be gone, and is not to be missed

    def _has(self, weights: WeightFile) -> bool:
        if self._loaded is None:  # what the server had before may be another run's
            return False
        return weights == self._loaded or weights.version < self.version

    async def _update(self, weights: WeightFile, interrupt: Interrupt, invitation: Invitation | None) -> WeightUpdate:
        what = f"the update to version {weights.version}"
        if interrupt == "keep" and not self._spans:
            raise RolloutError(
                f'{self.name}: {what}: rollout.interrupt = "keep" needs versions by spans, not by pieces'
            )
        async with self._turn:
            if self._broken.is_set():
                raise RolloutError(f"{self.name}: {self._why}")
            if self._has(weights):
                return WeightUpdate(version=self.version, interrupted=0, seconds=0.0)
            if invitation is None:
                await self._server.workers("fleuve_prepare", [weights], what)
            else:
                await self._receive(weights, invitation, what)
            if interrupt == "finish" and any(flight.has_tokens for flight in self._flights.values()):
                await self._until_running(what)  # whoever paused it lets the answers end first
            async with self._switch:
                self._swapping = True
                self._open.clear()
                try:
                    result = await self._swap(weights, interrupt, what)
                except BaseException as error:
                    self._why = f"it is left paused: {what} failed half-way: {error or type(error).__name__}"
                    self._broken.set()
                    raise
                finally:
                    self._swapping = False
            self._open.set()
            return result

    async def _receive(self, weights: WeightFile, invitation: Invitation, what: str) -> None:
        """Have the server's workers receive, beside what they compute."""
        await self._server.workers("fleuve_receive", [weights, invitation], what)
        try:
            async with asyncio.timeout(self._update_timeout):
                while None in await self._server.workers("fleuve_received", [], what):  # noqa: ASYNC110 (its state)
                    await asyncio.sleep(RECEIVED)
        except TimeoutError:
            raise RolloutError(f"{self.name}: {what}: no broadcast within {self._update_timeout:g} s") from None

    async def _until_running(self, what: str) -> None:
        limit = self._update_timeout + self._request_timeout
        try:
            async with asyncio.timeout(limit):
                await self._running.wait()
        except TimeoutError:
            raise RolloutError(f"{self.name}: {what} waited {limit:g} s for a paused worker's answers to end") from None

    async def _swap(self, weights: WeightFile, interrupt: Interrupt, what: str) -> WeightUpdate:
        begun = time.perf_counter()
        await self._stop_for(interrupt, what)
        begun = time.perf_counter() if interrupt == "finish" else begun
        await self._server.post("/start_weight_update", None, what)
        info = {"version": weights.version, "checksum": weights.checksum}
        await self._server.post("/update_weights", {"update_info": info}, what)
        await self._server.post("/finish_weight_update", {"weight_version": str(weights.version)}, what)
        met = 0 if interrupt == "finish" else sum(flight.meet_update() for flight in self._flights.values())
        self.version, self._loaded = weights.version, weights
        if self._running.is_set():
            await self._server.post("/resume", None, what)
        return WeightUpdate(version=weights.version, interrupted=met, seconds=time.perf_counter() - begun)

    async def _stop_for(self, interrupt: Interrupt, what: str) -> None:
        """Pause the server. Where versions come by pieces, none is in flight after this.

        The prefix cache goes with the weights that computed it, but for `keep`, where answers stand on it: requests of
        the new version do not match what is there, by their salt.
        """
        timeout = self._update_timeout
        if interrupt == "finish":
            mode, timeout = "wait", timeout + self._request_timeout
        elif self._spans:
            mode = "keep"
        else:
            mode = "abort"
        if not self._spans:
            for flight in self._flights.values():
                flight.cut()
        cleared = "false" if interrupt == "keep" else "true"
        await self._server.post(f"/pause?mode={mode}&clear_cache={cleared}", None, what, timeout)
        if not self._spans:
            # What the server had has ended. A request that arrived later waits there, and would be answered by the new
            # weights: it is withdrawn, and sent again.
            pieces = [flight.piece for flight in self._flights.values() if flight.piece is not None]
            await self._arrived(pieces)
            await self._end(pieces)
            await asyncio.gather(*(piece.ended.wait() for piece in pieces))

    async def _arrived(self, pieces: Sequence[Piece]) -> None:
        """Until the server has these requests, for some seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL):
                for piece in pieces:
                    await _either(piece.arrived, piece.ended)

    # --- pausing ----------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._running.clear()
        async with self._switch:
            if not self._running.is_set() and not self._broken.is_set():
                await self._server.post("/pause?mode=keep&clear_cache=false", None, "pause")

    async def resume(self) -> None:
        """Go on. What has been asked before is there then; an update in progress goes on first."""
        await self._arrived([flight.piece for flight in self._flights.values() if flight.piece is not None])
        self._running.set()
        if self._swapping:
            return  # it resumes the server itself
        async with self._switch:
            if self._running.is_set() and not self._broken.is_set():
                await self._server.post("/resume", None, "resume")

    # --- what it says of itself -------------------------------------------------------------------------------------

    async def health(self) -> int:
        """The version that it samples with. Whatever is computed the server answers; which weights the engine has it
        says between two steps."""
        if self._broken.is_set():
            raise RolloutError(f"{self.name}: {self._why}")
        await self._server.get("/health", "a probe")
        version = self.version
        if self._labelled and not self._swapping:
            with suppress(TimeoutError):
                async with asyncio.timeout(LABEL_PATIENCE):
                    label = await self._label()
                    if version == self.version and not self._swapping:
                        return label
        return self.version

    async def _label(self) -> int:
        reply = await self._server.get("/weight_info", "a probe")
        try:
            found: Any = msgspec.json.decode(reply)
            return wire.version_of(str(found["weight_version"]), self._initial)
        except (msgspec.DecodeError, KeyError, TypeError, wire.WireError) as error:
            raise RolloutError(f"{self.name}: it does not say which weights it has: {error}") from error

    async def metrics(self) -> dict[str, float]:
        """The server's counters, under the names of the embedded engine's. What waits is what this client has asked for
        and the server does not run: it counts them itself only when it next computes."""
        reply = await self._server.get("/metrics", "metrics")
        try:
            found = wire.counters(reply.decode(errors="replace"))
        except wire.WireError as error:
            raise RolloutError(f"{self.name}: {error}") from error
        found["running"] = min(found["running"], float(len(self._flights)))
        found["waiting"] = len(self._flights) - found["running"]
        return {**found, "version": float(self.version), "paused": float(not self._running.is_set())}


async def _either(*these: asyncio.Event | asyncio.Future[Any]) -> None:
    """Until one of these events is set, or one of these futures is done."""
    if any(one.is_set() if isinstance(one, asyncio.Event) else one.done() for one in these):
        return
    waits = [asyncio.ensure_future(one.wait()) if isinstance(one, asyncio.Event) else one for one in these]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait, one in zip(waits, these, strict=True):
            if isinstance(one, asyncio.Event):
                wait.cancel()
