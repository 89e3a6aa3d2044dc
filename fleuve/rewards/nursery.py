"""The pool's side of a `forkserver` process: ask it for workers, hear of their ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from fleuve.errors import UserError
from fleuve.launch.child import spawn_arguments
from fleuve.launch.process import describe_status, thread_environment
from fleuve.rewards.process import CrashError, KilledError, VerifierProcess
from fleuve.rewards.protocol import HEADER, Ended, Forked, Ready, WorkerOptions, decode, length

_EXIT_SECONDS = 10.0
_POLL_SECONDS = 0.05


class Nursery:
    """A process with the verifiers loaded, which forks workers in milliseconds. It may die at any time: its workers
    go on, and another takes over from it."""

    def __init__(self, process: asyncio.subprocess.Process, requests: socket.socket) -> None:
        self._process = process
        self._requests = requests
        self._asked: deque[asyncio.Future[tuple[int, asyncio.Future[int | None]]]] = deque()
        self._ends: dict[int, asyncio.Future[int | None]] = {}
        self._orphans: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, options: WorkerOptions, timeout: float, log_path: Path | None = None) -> Nursery:
        """Start the process and wait until its verifiers are loaded.

        Raises:
            UserError: a verifier cannot be loaded.
            CrashError: it died (`KilledError`: by a signal), or was not ready within `timeout` seconds.
        """
        requests, theirs = socket.socketpair()
        requests.setblocking(False)
        with theirs, (log_path or Path(os.devnull)).open("ab") as log:
            spawning = asyncio.create_task(
                asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "fleuve.rewards.forkserver",
                    msgspec.json.encode(options).decode(),
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    **spawn_arguments(thread_environment(1, huge_pages=False)),
                )
            )
            try:
                # Cancelled in the middle, asyncio (3.11) waits for ever for pipes that it has not connected yet.
                process = await asyncio.shield(spawning)
            except asyncio.CancelledError:
                await cls(await spawning, requests).end()
                raise
            except BaseException:
                requests.close()
                raise
        nursery = cls(process, requests)
        try:
            async with asyncio.timeout(timeout):
                ready = await nursery._read(Ready)
            if ready.error:
                raise UserError(ready.error)
        except TimeoutError:
            await nursery.end()
            raise CrashError(f"a verifier process was not ready within {timeout:g} s") from None
        except asyncio.IncompleteReadError:
            status = await nursery.end()
            kind = KilledError if status < 0 else CrashError
            raise kind(f"a verifier process died while it loaded: {describe_status(status)}") from None
        except BaseException:
            await nursery.end()
            raise
        nursery._reading = asyncio.create_task(nursery._hear())
        return nursery

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self.died.done()

    async def fork(self, timeout: float) -> VerifierProcess:
        """A new worker, ready to check.

        Raises:
            UserError: a verifier cannot be loaded (by the worker, where `WorkerOptions.late`).
            CrashError: there is none within `timeout` seconds, it died at once, or this process has died
                (`KilledError`, and so for a worker that a signal ended).
        """
        if not self.alive:
            raise KilledError("the process that forks verifier processes died")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                ours.setblocking(False)
                socket.send_fds(self._requests, [b"w"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise KilledError(f"the process that forks verifier processes does not listen: {error}") from None
        asked: asyncio.Future[tuple[int, asyncio.Future[int | None]]] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        try:
            async with asyncio.timeout(timeout):
                pid, ended = await asked
        except TimeoutError:
            ours.close()
            self.kill()  # it is stopped, or stuck: another takes over
            raise CrashError(f"no verifier process was forked within {timeout:g} s") from None
        except BaseException:
            ours.close()  # a worker that comes of it all the same reads its end and goes
            raise
        worker = VerifierProcess(pid, *await asyncio.open_connection(sock=ours), ended, self.died.done)
        try:
            await worker.ready(timeout)
        except BaseException:
            await worker.end()
            raise
        return worker

    def kill(self) -> None:
        """SIGKILL to this process alone. May be called at any time and again."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Kill, and wait until the process is gone; its exit status. Workers' ends are noticed all the same."""
        self.kill()
        self._requests.close()
        async with asyncio.timeout(_EXIT_SECONDS):
            status = await self._process.wait()
        # asyncio closes it only once both pipes have reported their end, which a closing loop may not live to see.
        self._process._transport.close()  # type: ignore[attr-defined]
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        return status

    async def _hear(self) -> None:
        """Take in what it reports until it is gone."""
        try:
            while True:
                match await self._read(Forked | Ended):
                    case Forked(pid=0, error=error):
                        self._give(CrashError(error))
                    case Forked(pid=pid):
                        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
                        self._ends[pid] = ended
                        self._give((pid, ended))
                    case Ended(pid=pid, status=status):
                        _settle(self._ends.pop(pid), status)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, KeyError, msgspec.DecodeError):
            self.kill()  # gone, or speaking nonsense
        finally:
            self.died.set_result(None)
            while self._asked:
                self._give(KilledError("the process that forks verifier processes died"))
            for pid, ended in self._ends.items():
                task = asyncio.create_task(_watch(pid, ended))
                self._orphans.add(task)
                task.add_done_callback(self._orphans.discard)

    def _give(self, outcome: tuple[int, asyncio.Future[int | None]] | CrashError) -> None:
        """The outcome of the oldest request. If nobody waits for it any more, its socket is closed: the worker goes."""
        asked = self._asked.popleft()
        if asked.done():
            return
        if isinstance(outcome, CrashError):
            asked.set_exception(outcome)
        else:
            asked.set_result(outcome)

    async def _read(self, kind: Any) -> Any:
        assert self._process.stdout is not None
        size = length(await self._process.stdout.readexactly(HEADER))
        return decode(await self._process.stdout.readexactly(size), kind)


def _settle(ended: asyncio.Future[int | None], status: int | None) -> None:
    if not ended.done():
        ended.set_result(status)


async def _watch(pid: int, ended: asyncio.Future[int | None]) -> None:
    """Notice the end of a process whose parent is gone. A zombie has ended: who inherited it may never reap it."""
    try:
        descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        _settle(ended, None)
        return
    try:
        while not _gone(pid, descriptor):  # noqa: ASYNC110 (another process, and not our child)
            await asyncio.sleep(_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it has left behind: no nursery is there to see to it
        _settle(ended, None)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _gone(pid: int, descriptor: int | None) -> bool:
    if descriptor is not None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return True
    return False
