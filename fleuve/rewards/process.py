"""One verifier process as the pool sees it: start, check, kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleuve.errors import UserError
from fleuve.launch.child import spawn_arguments
from fleuve.launch.process import describe_status, thread_environment
from fleuve.rewards.protocol import HEADER, Check, Ready, Result, WorkerOptions, decode, frame, length

GRACE = 0.05
"""Seconds after a deadline in which a result that already lies in the pipe is still taken: this process's event loop
may itself have been late."""
_EXIT_SECONDS = 10.0

T = TypeVar("T")


class CrashError(RuntimeError):
    """The verifier process ended, or spoke nonsense, before it answered."""


class DeadlineError(RuntimeError):
    """A check was not answered within its deadline."""


class VerifierProcess:
    """A warm `fleuve.rewards.worker` in its own process group. Runs one check at a time; after `check` has raised, its
    state is unknown and it can only be killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, options: WorkerOptions, timeout: float, log_path: Path | None = None) -> VerifierProcess:
        """Start a process and wait until its verifiers are loaded.

        Raises:
            UserError: a verifier cannot be loaded.
            CrashError: it died, or was not ready within `timeout` seconds.
        """
        with (log_path or Path(os.devnull)).open("ab") as log:
            spawning = asyncio.create_task(
                asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "fleuve.rewards.worker",
                    msgspec.json.encode(options).decode(),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    **spawn_arguments(thread_environment(1, huge_pages=False)),
                )
            )
            try:
                # Cancelled in the middle, asyncio (3.11) waits for ever for pipes that it has not connected yet.
                process = await asyncio.shield(spawning)
            except asyncio.CancelledError:
                await cls(await spawning).end()
                raise
        worker = cls(process)
        try:
            ready = await worker._answer(Ready, timeout)
            if ready.error:
                raise UserError(ready.error)
        except DeadlineError:
            await worker.end()
            raise CrashError(f"a verifier process was not ready within {timeout:g} s") from None
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def check(self, check: Check, deadline: float) -> Result:
        """Run one check; `deadline` seconds start now.

        Raises:
            DeadlineError: no result in time.
            CrashError: the process ended first.
            ValueError, TypeError, OverflowError, RecursionError: `check` cannot be encoded; the process is untouched.
        """
        assert self._process.stdin is not None
        message = frame(check)
        with contextlib.suppress(ConnectionError):  # it is dead: reading says so, and how
            self._process.stdin.write(message)
        return await self._answer(Result, deadline)

    def kill(self) -> None:
        """SIGKILL to the process and all it has started. May be called at any time and again."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill, and wait until the process is gone."""
        self.kill()
        async with asyncio.timeout(_EXIT_SECONDS):
            await self._process.wait()
        # asyncio closes it only once both pipes have reported their end, which a closing loop may not live to see.
        self._process._transport.close()  # type: ignore[attr-defined]

    async def _answer(self, kind: type[T], deadline: float) -> T:
        # Not `asyncio.timeout`: it would cancel the read in the same turn of a late loop that brings the result.
        reading = asyncio.create_task(self._read(kind))
        try:
            for wait in (deadline, GRACE):
                done, _ = await asyncio.wait({reading}, timeout=wait)
                if done:
                    return reading.result()
            raise DeadlineError
        finally:
            reading.cancel()

    async def _read(self, kind: type[T]) -> T:
        assert self._process.stdout is not None
        stream: Any = self._process.stdout
        try:
            size = length(await stream.readexactly(HEADER))
            return decode(await stream.readexactly(size), kind)
        except (asyncio.IncompleteReadError, ConnectionError):
            try:
                async with asyncio.timeout(_EXIT_SECONDS):
                    status = await self._process.wait()
            except TimeoutError:
                raise CrashError("it closed its pipe and went on") from None
            raise CrashError(describe_status(status)) from None
        except (ValueError, msgspec.DecodeError) as error:
            raise CrashError(f"its answer cannot be read: {error}") from None
