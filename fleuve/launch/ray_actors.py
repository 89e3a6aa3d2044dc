"""What runs on a node of a Ray cluster: an actor for each process, and one for a node that shares no file system with
the others.

An actor starts the process that `launch.process` would start, from the same command line, and holds its lifeline: when
the actor ends, be it that Ray ends it, that the run's own process is gone, or that the node's raylet dies, the process
ends with all it has started. `ray_host` makes actors of these classes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray

from fleuve.launch.process import ChildError, ChildProcess, LostAtStartError
from fleuve.types import WeightFile
from fleuve.weights.mirror import Mirror, MirrorError, serve

MAX_PIECE = 1 << 20
"""Bytes of a log that are sent at a time."""
MAX_BEHIND = 16 << 20
"""Bytes that a log may grow by between two looks at it; of more, the oldest are left out."""


class Spot(msgspec.Struct, frozen=True):
    """Where an actor has come to be. `sees` says of each probe whether that file is there, with its content."""

    node: str
    address: str
    host: str
    sees: list[bool]


class Started(msgspec.Struct, frozen=True):
    """A process that answers."""

    pid: int
    url: str
    token: str | None


class Failed(msgspec.Struct, frozen=True):
    """A process that did not come up; `lost` as `LostAtStartError` says."""

    what: str
    lost: bool


class LogPiece(msgspec.Struct, frozen=True):
    """What a log has from `start` on; `end` is where the next piece begins."""

    start: int
    end: int
    content: bytes


class ProcessActor:
    """One process. Its log is an unlinked temporary file, which is gone when both have ended."""

    def __init__(self, directory: str, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        with contextlib.suppress(OSError):  # relative paths mean what they mean to the run, where there is that place
            os.chdir(directory)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as this is)
        self._child: ChildProcess | None = None

    async def spot(self, probes: Sequence[tuple[str, bytes]]) -> Spot:
        """Where this is, and which of the files `probes` it sees."""
        sees = [_reads(path, content) for path, content in probes]
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return Spot(node, address, socket.gethostname(), sees)

    async def start(
        self, name: str, module: str, options: Mapping[str, Any], address: str, arguments: Mapping[str, Any]
    ) -> Started | Failed:
        """Start it, on a socket of `address`; `arguments` are those of `ChildProcess.start`."""
        _take_back_priority()
        log = Path(f"/proc/{os.getpid()}/fd/{self._log.fileno()}")
        try:
            self._child = await ChildProcess.start(name, module, options, log, address=address, **arguments)
        except ChildError as error:
            return Failed(error.what, isinstance(error, LostAtStartError))
        except OSError as error:
            return Failed(f"could not be started: {error}", lost=False)
        return Started(self._child.pid, self._child.url, self._child.token)

    async def wait(self) -> tuple[int, str]:
        """The exit status and what it says, once the process has ended."""
        assert self._child is not None
        status = await self._child.wait()
        return status, self._child.ending

    async def stop(self, grace: float) -> None:
        """See `ChildProcess.stop`."""
        if self._child is not None:
            await self._child.stop(grace)

    async def kill(self) -> None:
        """See `ChildProcess.kill`."""
        if self._child is not None:
            self._child.kill()

    async def read_log(self, start: int) -> LogPiece:
        """What the process has written from byte `start` on, at most `MAX_PIECE` of it."""
        size = os.fstat(self._log.fileno()).st_size
        if size - start > MAX_BEHIND:
            start = size - MAX_PIECE
        content = os.pread(self._log.fileno(), MAX_PIECE, start)
        return LogPiece(start, start + len(content), content)


class NodeActor:
    """A node's weights directory, where the node does not see that of the others."""

    def __init__(self, directory: str) -> None:
        self._mirror = Mirror(Path(directory))
        self._serving: tuple[str, str, Callable[[], Awaitable[None]]] | None = None

    async def serve(self, address: str) -> tuple[str, str]:
        """Let other nodes fetch from this one; URL and token."""
        if self._serving is None:
            sock, token = socket.create_server((address, 0), backlog=128), secrets.token_urlsafe()
            end = await serve(self._mirror.directory, sock, token)
            self._serving = f"http://{address}:{sock.getsockname()[1]}", token, end
        return self._serving[:2]

    async def bring(self, file: WeightFile, url: str, token: str, timeout: float) -> int | str:
        """See `Mirror.bring`; what went wrong is returned as its line."""
        try:
            return await self._mirror.bring(file, url, token, timeout)
        except MirrorError as error:
            return str(error)

    async def close(self) -> None:
        """Remove the directory."""
        self._mirror.close()


def _take_back_priority() -> None:
    """Ray lowers the priority of what it starts. A process of ours has the raylet's, where that is allowed: what this
    thread starts inherits from it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))


def _reads(path: str, content: bytes) -> bool:
    try:
        return Path(path).read_bytes() == content
    except OSError:
        return False
