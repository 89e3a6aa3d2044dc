"""The controller's end of the trainer: `contracts.Trainer` over HTTP. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec

from fleuve.contracts import TrainerError, TrainerLostError
from fleuve.errors import UserError
from fleuve.types import Batch, StepResult, WeightFile, decode, encode
from fleuve.weights.invitation import Call, Hall, Loss
from fleuve.wire.guard import bearer

T = TypeVar("T")

INTERRUPT_TIMEOUT = 10.0
"""Seconds in which the trainer acknowledges an interruption (not: ends the step)."""


class TrainerClient:
    """An asynchronous context manager: `async with TrainerClient(url, step_timeout, token) as trainer`.

    Every call ends within `timeout` seconds, or raises a TrainerError that names what it waited for.
    """

    def __init__(self, url: str, timeout: float, token: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._token = token
        self._session: aiohttp.ClientSession | None = None
        self._step: str | None = None  # the id of the one in progress

    async def __aenter__(self) -> TrainerClient:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), headers=bearer(self._token))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def step(self, batch: Batch) -> StepResult:
        """Train one batch.

        Raises:
            TrainerError: the step failed (the message ends with the trainer's traceback), took too long, or the
                trainer is gone.
        """
        what = f"step {batch.version + 1} ({len(batch.groups)} groups)"
        self._step = step = secrets.token_hex(8)
        try:
            return self._decoded(await self._post(what, f"/step?id={step}", encode(batch)), StepResult, what)
        finally:
            self._step = None

    async def interrupt(self) -> None:
        """End the step in progress after the micro-batch it is at; nothing happens if there is none. A step whose batch
        is still on its way ends before its first micro-batch."""
        if self._step is not None:
            await self._post("interrupt", "/interrupt", json.dumps({"id": self._step}).encode(), INTERRUPT_TIMEOUT)

    async def publish(self, served: int | None = None) -> WeightFile:
        """Write the current version's weights; `served` is the version that the workers have."""
        body = json.dumps({"served": served}).encode()
        return self._decoded(await self._post("publish", "/publish", body), WeightFile, "publish")

    async def hall(self) -> Hall:
        """Where it holds the meetings of its broadcasts."""
        answer = await self._request("a broadcast", "GET", "/broadcast", None, INTERRUPT_TIMEOUT)
        return self._decoded(answer, Hall, "a broadcast")

    async def broadcast(self, call: Call) -> None:
        """Send published weights; returns when that is over.

        Raises:
            TrainerError: it broke off, or nobody came.
        """
        await self._post(f"the broadcast of version {call.weights.version}", "/broadcast", encode(call))

    async def lose(self, loss: Loss) -> None:
        """A member of a broadcast is not to be waited for."""
        await self._post("a loss", "/lose", encode(loss), INTERRUPT_TIMEOUT)

    async def save(self, path: Path) -> None:
        """Write a checkpoint directory (on the trainer's machine).

        Raises:
            TrainerError: the disk is full, or whatever the system says; one line with the path.
        """
        await self._post(f"save to {path}", "/save", _place(path))

    async def load(self, path: Path) -> None:
        """Continue from a checkpoint directory.

        Raises:
            UserError: it is none, or another model's.
        """
        await self._post(f"load from {path}", "/load", _place(path))

    async def health(self, timeout: float = INTERRUPT_TIMEOUT) -> dict[str, Any]:
        """The trainer's name, version, and what it is busy with; answered in the middle of a step too."""
        body = await self._request("health", "GET", "/health", None, timeout)
        found: dict[str, Any] = json.loads(body)
        return found

    async def meet(self, meeting: dict[str, Any]) -> None:
        """Tell a rank, other than the first, what the first one's `health` says of where they meet."""
        await self._post("meet", "/meet", json.dumps(meeting).encode())

    async def _post(self, what: str, path: str, body: bytes, timeout: float | None = None) -> bytes:
        return await self._request(what, "POST", path, body, timeout or self._timeout)

    async def _request(self, what: str, method: str, path: str, body: bytes | None, timeout: float) -> bytes:
        if self._session is None:
            raise RuntimeError("TrainerClient is used outside of its `async with`")
        try:
            async with asyncio.timeout(timeout):
                async with self._session.request(method, self._url + path, data=body) as response:
                    answer = await response.read()
        except TimeoutError as error:
            raise TrainerLostError(f"trainer at {self._url}: no answer to {what} within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TrainerLostError(f"trainer at {self._url}: {what} failed: {error or type(error).__name__}") from error
        if response.status != 200:
            raise _error(answer, f"trainer at {self._url}: {what} failed")
        return answer

    def _decoded(self, answer: bytes, kind: type[T], what: str) -> T:
        try:
            return decode(answer, kind)
        except msgspec.DecodeError as error:
            raise TrainerError(f"trainer at {self._url}: cannot read its answer to {what}: {error}") from error


def _place(path: Path) -> bytes:
    """The body that names a checkpoint: relative paths are those of this process."""
    return json.dumps({"path": str(path.absolute())}).encode()


def _error(answer: bytes, where: str) -> Exception:
    """What the trainer reported: the user's to mend, or a TrainerError (with its traceback, if it sent one)."""
    try:
        found = json.loads(answer)
        kind, reason, trace = found["kind"], found["error"], found.get("traceback")
    except (ValueError, KeyError, TypeError):
        return TrainerError(f"{where}: {answer.decode(errors='replace')}")
    if kind == UserError.__name__:
        return UserError(reason)
    return TrainerError(f"{where}: {kind}: {reason}" + (f"\n{trace}" if trace else ""))
