"""A process on a node of a Ray cluster, as the run sees it: `host.Process` by way of an actor."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from fleuve.launch.process import ChildError, describe_status
from fleuve.launch.ray_actors import LogPiece, Spot, Started

LOOK_EVERY = 1.0
"""Seconds between two looks at a log, and between two tries to reach an actor that is not to be reached."""
ANSWER = 5.0
"""Seconds for an actor to do as it is told, beyond what that takes; then it is taken for gone."""
LAST_PIECES = 5.0
"""Seconds for the rest of a log once its process has ended."""


class RayProcess:
    """Made by `RayHost.start`; see `host.Process`. `forget` is called once it has ended, or has been given up."""

    def __init__(
        self,
        name: str,
        actor: Any,
        spot: Spot,
        started: Started,
        log: LogCopy,
        forget: Callable[[], Awaitable[None]],
    ) -> None:
        self.name = name
        self.log_path = log.path
        self.spot = spot
        self.pid = started.pid
        self.url = started.url
        self.token = started.token
        self.ending = ""
        self._actor = actor
        self._log = log
        self._forget = forget
        self._stopping = False
        self._status: int | None = None
        self._ended = asyncio.create_task(self._watch())

    @property
    def alive(self) -> bool:
        return self._status is None

    async def wait(self) -> int:
        """The exit status, negative for a signal; as if killed, where the node is lost."""
        return await asyncio.shield(self._ended)

    async def died(self) -> ChildError:
        status = await self.wait()
        if self._stopping:
            await asyncio.Event().wait()
        where = f"(pid {self.pid} on {self.spot.host})"
        return ChildError(self.name, f"{where} died: {self.ending or describe_status(status)}", self.log_path)

    async def stop(self, grace: float = 5.0) -> int:
        self._stopping = True
        if self.alive:
            told = self._actor.stop.remote(grace)
            with contextlib.suppress(TimeoutError, RayError):
                async with asyncio.timeout(grace + ANSWER):
                    await told
                    await self.wait()
        if self.alive:
            self._end(-signal.SIGKILL, f"its actor on {self.spot.host} does not answer")
        await self._forget()
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        self._stopping = True
        if self.alive:
            with contextlib.suppress(RayError):
                self._actor.kill.remote()

    async def _watch(self) -> int:
        copying = asyncio.create_task(self._log.follow(self._actor))
        try:
            status, words = await _ending(self._actor)
        except RayActorError as error:
            status, words = -signal.SIGKILL, f"lost with its actor on {self.spot.host}: {_reason(error)}"
        copying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await copying
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(LAST_PIECES):
                await self._log.catch_up(self._actor)
        self._end(status, words)
        assert self._status is not None
        return self._status

    def _end(self, status: int, words: str) -> None:
        if self._status is None:
            self._status, self.ending = status, words


class LogCopy:
    """Brings the log of a process on another node into a file here, behind what is there already."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._at = 0
        self._copying = asyncio.Lock()

    async def follow(self, actor: Any) -> None:
        """Never returns, unless the actor is gone."""
        with contextlib.suppress(RayActorError):
            while True:
                with contextlib.suppress(ActorUnavailableError):
                    await self.catch_up(actor)
                await asyncio.sleep(LOOK_EVERY)

    async def catch_up(self, actor: Any) -> None:
        """Everything that is there now.

        Raises:
            RayError: the actor does not answer.
        """
        async with self._copying:
            while True:
                piece: LogPiece = await actor.read_log.remote(self._at)
                with self.path.open("ab") as copy:
                    if piece.start > self._at:
                        copy.write(b"\n[%d bytes were written too fast to be copied]\n" % (piece.start - self._at))
                    copy.write(piece.content)
                self._at = piece.end
                if not piece.content:
                    return


async def _ending(actor: Any) -> tuple[int, str]:
    """Exit status and words, once the process has ended.

    Raises:
        RayActorError: the actor is gone.
    """
    while True:
        try:
            ended: tuple[int, str] = await actor.wait.remote()
            return ended
        except ActorUnavailableError:  # a connection was lost; what becomes of the node is not known yet
            await asyncio.sleep(LOOK_EVERY)


def _reason(error: RayActorError) -> str:
    """Ray's words, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
