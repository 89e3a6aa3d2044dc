"""One verifier process as the pool sees it: check, kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from fleuve.errors import UserError
from fleuve.launch.process import describe_status, is_stopped
from fleuve.rewards.protocol import HEADER, Check, Promise, Ready, Result, Taken, decode, frame, length

GRACE = 0.05
"""Seconds after a deadline in which a result that already lies in the pipe is still taken: this process's event loop
may itself have been late."""
_TAKE_SECONDS = 30.0
"""For an idle worker to take a check up. One that does not is swamped, or hangs, which is no check's fault."""
_LOOK_SECONDS = 1.0
"""For an idle worker to take a check up before it is looked whether it is stopped; and between two looks."""
_EXIT_SECONDS = 10.0

T = TypeVar("T")
_ANSWERS: Any = Result | Promise


class CrashError(RuntimeError):
    """The verifier process ended, or spoke nonsense, before it answered."""


class KilledError(CrashError):
    """A signal ended the process, or something unseen: it may not happen again."""


class LostError(CrashError):
    """The verifier process was gone before it took the check up."""


class DeadlineError(RuntimeError):
    """A check was not answered within its deadline."""


class VerifierProcess:
    """A warm worker in its own process group. Runs one check at a time; after `check` has raised, its state is unknown
    and it can only be killed. `ended` gets its exit status, or None if nobody saw it; `orphaned` tells whether the
    process that it was forked from is gone."""

    def __init__(
        self,
        pid: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ended: asyncio.Future[int | None],
        orphaned: Callable[[], bool],
    ) -> None:
        self.pid = pid
        self.orphaned = orphaned
        self.checks = 0
        self.memory = 0
        self._reader = reader
        self._writer = writer
        self._ended = ended
        ended.add_done_callback(lambda _: self._hang_up())

    @property
    def alive(self) -> bool:
        return not self._ended.done() and not self._reader.at_eof()

    async def ready(self, timeout: float) -> None:
        """Wait until its verifiers are loaded.

        Raises:
            UserError: one cannot be.
            CrashError: it died, or was not ready within `timeout` seconds.
        """
        try:
            ready = await self._answer(Ready, timeout)
        except DeadlineError:
            raise CrashError(f"a verifier process was not ready within {timeout:g} s") from None
        if ready.error:
            raise UserError(ready.error)

    async def check(self, check: Check, deadline: float) -> Result:
        """Run one check; `deadline` seconds start when the process takes it up, or what it promises.

        Raises:
            DeadlineError: no result in time.
            LostError: the process ended, or did nothing, before it took the check up.
            CrashError: the process ended before it answered.
            ValueError, TypeError, OverflowError, RecursionError: `check` cannot be encoded; the process is untouched.
        """
        message = frame(check)
        with contextlib.suppress(ConnectionError):  # it is dead: reading says so, and how
            self._writer.write(message)
        await self._taken_up()
        result = await self._result(deadline)
        self.checks += 1
        self.memory = result.memory
        return result

    def kill(self) -> None:
        """SIGKILL to the process and all it has started. May be called at any time and again."""
        if not self._ended.done():  # else the number may by now be another's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill, and wait until the process is gone.

        Raises:
            TimeoutError: it is not, after 10 s.
        """
        self.kill()
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                await asyncio.shield(self._ended)
        finally:
            self._writer.close()

    def _hang_up(self) -> None:
        """Stop reading from what has ended: a process it has left behind may hold the socket open. What it had still
        said lies in the buffer and is read first."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            asyncio.get_running_loop().call_later(GRACE, self._writer.transport.abort)

    async def _result(self, deadline: float) -> Result:
        loop = asyncio.get_running_loop()
        taken = loop.time()
        while True:
            message = await self._answer(_ANSWERS, taken + deadline - loop.time())
            if isinstance(message, Result):
                return message
            deadline = max(deadline, message.seconds)

    async def _taken_up(self) -> None:
        """Wait for the word that the check begins. A machine may be slow; one that is stopped will never take it up."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _TAKE_SECONDS
        reading = asyncio.create_task(self._read(Taken))
        try:
            while not await _done(reading, min(_LOOK_SECONDS, until - loop.time())):
                if is_stopped(self.pid):
                    raise LostError("it was stopped and did not take the check up")
                if loop.time() >= until:
                    raise LostError(f"it did not take the check up within {_TAKE_SECONDS:g} s")
            reading.result()
        except CrashError as error:
            raise LostError(str(error)) from None
        finally:
            reading.cancel()

    async def _answer(self, kind: type[T], deadline: float) -> T:
        reading = asyncio.create_task(self._read(kind))
        try:
            if await _done(reading, deadline):
                return reading.result()
            raise DeadlineError
        finally:
            reading.cancel()

    async def _read(self, kind: type[T]) -> T:
        try:
            size = length(await self._reader.readexactly(HEADER))
            return decode(await self._reader.readexactly(size), kind)
        except (asyncio.IncompleteReadError, ConnectionError):
            try:
                async with asyncio.timeout(_EXIT_SECONDS):
                    status = await asyncio.shield(self._ended)
            except TimeoutError:
                raise CrashError("it closed its socket and went on") from None
            if status is None:
                raise KilledError("it ended") from None
            raise (KilledError if status < 0 else CrashError)(describe_status(status)) from None
        except (ValueError, msgspec.DecodeError) as error:
            raise CrashError(f"its answer cannot be read: {error}") from None


async def _done(reading: asyncio.Task[T], timeout: float) -> bool:
    """Whether it comes to an end within `timeout` seconds, and what lies in the pipe then is read."""
    # Not `asyncio.timeout`: it would cancel the read in the same turn of a late loop that brings the result.
    for wait in (timeout, GRACE):
        if (await asyncio.wait({reading}, timeout=wait))[0]:
            return True
    return False
