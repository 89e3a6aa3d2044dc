"""One vLLM server's HTTP: requests with deadlines, and errors in one line that name the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.rollout.vllm_wire import reason
from fleuve.wire.guard import bearer
from fleuve.wire.open_files import allow_many_connections


class ForbiddenError(RolloutError):
    """The server wants a token, and not the one that it was shown, if any."""


class Server:
    """The server at `url`, as the worker `name`; `timeout` is for calls that do not say. A context manager."""

    def __init__(self, name: str, url: str, timeout: float, token: str | None = None) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Server:
        allow_many_connections()
        # A connection for each request: the server closes them after 5 idle seconds, and after an error of its own,
        # which could meet a request that is on its way.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, headers=bearer(self._token))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, what: str) -> bytes:
        """See `call`."""
        return await self.call("GET", path, None, what)

    async def post(self, path: str, body: Mapping[str, Any] | None, what: str, timeout: float | None = None) -> bytes:
        """See `call`."""
        return await self.call("POST", path, body, what, timeout)

    async def workers(self, method: str, args: Sequence[msgspec.Struct], what: str) -> list[Any]:
        """What a method of Fleuve's extension returns in each of the server's workers. Raises as `call` does; and a
        RolloutError if the reply cannot be read."""
        body = {"method": method, "args": [msgspec.json.encode(arg).decode() for arg in args]}
        reply = await self.post("/collective_rpc", body, what)
        try:
            results: list[Any] = msgspec.json.decode(reply)["results"]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise RolloutError(f"{self.name}: its answer to {what} cannot be read: {error}") from error
        return results

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None, what: str, timeout: float | None = None
    ) -> bytes:
        """One exchange, for `what`; the body of the response.

        Raises:
            WorkerLostError: nobody was there, or the connection was lost.
            ForbiddenError: status 401 or 403.
            RolloutError: deadline over, or another status than 200.
        """
        seconds = self._timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds), self.exchange(method, path, body, what) as response:
                return await response.read()
        except TimeoutError:
            raise RolloutError(f"{self.name}: no answer to {what} within {seconds:g} s") from None

    @asynccontextmanager
    async def exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, what: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to one request, whose status is 200; the deadline is the caller's. Raises as `call` does."""
        if self._session is None:
            raise RuntimeError(f"{self.name}: the client is used as a context manager")
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                if response.status != 200:
                    why, status = reason(await response.read()), f"status {response.status}"
                    kind = ForbiddenError if response.status in (401, 403) else RolloutError
                    raise kind(f"{self.name}: {what} failed: {f'{why} ({status})' if why else status}")
                yield response
        except aiohttp.ClientError as error:
            raise WorkerLostError(
                f"{self.name}: connection lost during {what}: {error or type(error).__name__}"
            ) from error
