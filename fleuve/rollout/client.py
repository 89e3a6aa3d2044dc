"""A rollout worker as seen from the controller: the contract of the design's section 4.2, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp
import msgspec

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.types import (
    AbortRequest,
    Completion,
    GenerationRequest,
    Interrupt,
    Invitation,
    PackedCompletion,
    Progress,
    ProgressRequest,
    UpdateRequest,
    WeightFile,
    WeightUpdate,
    decode,
    encode,
)
from fleuve.wire.guard import bearer
from fleuve.wire.open_files import allow_many_connections

T = TypeVar("T")
ARRIVAL = 5.0
"""Seconds for requests on their way to arrive."""

_MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}


class _Health(msgspec.Struct):
    """What of the reply to `GET /health` is of use here."""

    version: int


class EngineClient:
    """Implements `contracts.RolloutEngine`; calls have deadlines, and fail with a RolloutError naming the worker."""

    seats = 1
    """In how many processes it takes broadcasts."""

    def __init__(
        self, name: str, url: str, request_timeout: float, update_timeout: float, token: str | None = None
    ) -> None:
        self.name = name
        self._url = url
        self._request_timeout = request_timeout
        self._update_timeout = update_timeout
        self._token = token
        self._in_flight = 0
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        allow_many_connections()
        # As many connections as there are answers in flight: a request that waited here for a connection would be
        # invisible to the engine's scheduler.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=bearer(self._token))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, request: GenerationRequest) -> Completion:
        what = f"request {request.request_id}"
        self._in_flight += 1
        try:
            packed = await self._post("/generate", request, PackedCompletion, self._request_timeout, what)
            return packed.opened()
        finally:
            self._in_flight -= 1

    async def health(self) -> int:
        """The version that it samples with."""
        reply = await self._call("GET", "/health", None, self._update_timeout, "a probe")
        return self._decoded(lambda: msgspec.json.decode(reply, type=_Health), "a probe").version

    async def update_weights(
        self, weights: WeightFile, interrupt: Interrupt, invitation: Invitation | None = None
    ) -> WeightUpdate:
        """See the contract; with an `invitation` the weights come by broadcast."""
        body = UpdateRequest(
            version=weights.version,
            path=weights.path,
            bytes=weights.bytes,
            checksum=weights.checksum,
            interrupt=interrupt,
            invitation=invitation or msgspec.UNSET,
        )
        # `finish` lets the answers in flight end first, and each of them has the time of a request.
        timeout = self._update_timeout + (self._request_timeout if interrupt == "finish" else 0.0)
        what = f"the update to version {weights.version}"
        return await self._post("/update_weights", body, WeightUpdate, timeout, what)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._post(
            "/abort", AbortRequest(request_ids=list(request_ids)), dict[str, Any], self._update_timeout, "abort"
        )

    async def progress(self, known: Mapping[str, int]) -> list[Progress]:
        """What has come of answers in flight beyond the tokens known of each."""
        body = ProgressRequest(known=dict(known))
        return await self._post("/progress", body, list[Progress], self._update_timeout, "the progress of answers")

    async def pause(self) -> None:
        await self._post("/pause", {}, dict[str, Any], self._update_timeout, "pause")

    async def resume(self) -> None:
        """Go on. What has been asked before is there then: each request travels on a connection of its own, and this
        must not overtake them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL):
                while self._in_flight:
                    metrics = await self.metrics()
                    if metrics.get("running", 0) + metrics.get("waiting", 0) >= self._in_flight:
                        break
        await self._post("/resume", {}, dict[str, Any], self._update_timeout, "resume")

    async def metrics(self) -> dict[str, float]:
        reply = await self._call("GET", "/metrics", None, self._update_timeout, "metrics")
        return self._decoded(lambda: msgspec.json.decode(reply, type=dict[str, float]), "metrics")

    async def _post(self, path: str, body: object, kind: type[T], timeout: float, what: str) -> T:
        reply = await self._call("POST", path, encode(body), timeout, what)
        return self._decoded(lambda: decode(reply, kind), what)

    def _decoded(self, read: Callable[[], T], what: str) -> T:
        try:
            return read()
        except (msgspec.DecodeError, RecursionError) as error:
            raise RolloutError(f"{self.name}: its answer to {what} cannot be read: {error}") from error

    async def _call(self, method: str, path: str, body: bytes | None, timeout: float, what: str) -> bytes:
        """One HTTP exchange.

        Raises:
            WorkerLostError: nobody was there, or the connection was lost.
            RolloutError: deadline over, or a status other than 200.
        """
        if self._session is None:
            raise RuntimeError(f"{self.name}: the client is used as a context manager")
        headers = _MSGPACK if body is not None else {}
        try:
            async with asyncio.timeout(timeout):
                async with self._session.request(method, self._url + path, data=body, headers=headers) as response:
                    reply = await response.read()
        except TimeoutError:
            raise RolloutError(f"{self.name}: no answer to {what} within {timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise WorkerLostError(
                f"{self.name}: connection lost during {what}: {error or type(error).__name__}"
            ) from error
        if response.status != 200:
            raise RolloutError(f"{self.name}: {what} failed: {reply.decode(errors='replace')[:2000]}")
        return reply
