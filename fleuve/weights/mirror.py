"""Published weights on machines that share no file system: each has a directory of the same path, and fetches over
HTTP, once a version, what the writer's machine has published.

A mirror follows its source: what the source has removed goes there too. Whoever reads from it checks size, checksum and
version as everywhere (`store.read_weights`); the mirror checks size and checksum as well, so that a file that was cut
off is never there under its name. Imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from fleuve.types import WeightFile
from fleuve.weights.directory import MAKER, claim
from fleuve.wire.confine import OutsideError, confined
from fleuve.wire.guard import bearer, guard

CHUNK = 4 << 20
"""Bytes that are read and checked at a time."""

SWEPT = 0.5
"""Seconds after which whoever holds a directory lives in it, and does not just sweep it away."""

_NAME = re.compile(r"weights-\d{8}\.safetensors")


class MirrorError(RuntimeError):
    """Weights could not be brought here. One line."""


class Mirror:
    """This machine's copy of the weights directory `directory`. It goes with `close`, unless it is the original."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._busy = asyncio.Lock()
        self._held = _make(directory)

    def close(self) -> None:
        """Remove the copy."""
        if self._held is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._held)
            self._held = None

    async def bring(self, file: WeightFile, url: str, token: str, timeout: float) -> int:
        """See to it that `file` is here, from the server at `url`; how many bytes had to be fetched for that. Callers
        that want the same version at the same time share one fetch.

        Raises:
            MirrorError: the source has it no more, does not answer in time, or sent something else; or there is no
                space left.
        """
        path = Path(file.path)
        if path.parent != self.directory or not _NAME.fullmatch(path.name):
            raise MirrorError(f"{path} is no published weights file of {self.directory}")
        what = f"weights of version {file.version} from {url}"
        try:
            async with asyncio.timeout(timeout), self._busy:
                if _size(path) == file.bytes:
                    return 0
                async with aiohttp.ClientSession(url, headers=bearer(token)) as session:
                    await self._follow(session)
                    await _fetch(session, path, file, what)
                return file.bytes
        except TimeoutError:
            raise MirrorError(f"{what}: not here within {timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise MirrorError(f"{what}: {error or type(error).__name__}") from error
        except OSError as error:
            raise MirrorError(f"{what}: {path}: {error.strerror or error}") from error

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        """Remove what the source has no more."""
        async with session.get("/") as response:
            response.raise_for_status()
            names = set(msgspec.json.decode(await response.read(), type=list[str]))
        for path in self.directory.glob("weights-*"):
            if path.name not in names:
                path.unlink(missing_ok=True)


def _make(directory: Path) -> int | None:
    """Make `directory` this process's; None where whoever made it lives on this machine, and removes it. It is there
    for a moment before it is held: should another run's sweep meet it then, it is made again."""
    deadline = time.monotonic() + SWEPT
    while True:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return claim(directory, MAKER)
        except FileNotFoundError:  # swept away
            continue
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)


async def _fetch(session: aiohttp.ClientSession, path: Path, file: WeightFile, what: str) -> None:
    part = path.with_suffix(".part")
    checksum, size = 0, 0
    try:
        async with session.get(f"/{path.name}") as response:
            if response.status == 404:
                raise MirrorError(f"{what}: it is not there any more")
            response.raise_for_status()
            with part.open("wb") as opened:
                async for piece in response.content.iter_chunked(CHUNK):
                    size += len(piece)
                    if size > file.bytes:
                        raise MirrorError(f"{what}: more than the {file.bytes} bytes that were published")
                    checksum = await asyncio.to_thread(_append, opened.fileno(), piece, checksum)
        found = f"{size} bytes, crc32:{checksum:08x}"
        if found != f"{file.bytes} bytes, {file.checksum}":
            raise MirrorError(f"{what}: {found} came, published were {file.bytes} bytes, {file.checksum}")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _append(fd: int, piece: bytes, checksum: int) -> int:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(fd, rest) :]
    return zlib.crc32(piece, checksum)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def application(directory: Path, token: str) -> web.Application:
    """Serves what is published in `directory`, and nothing else, to whoever knows the token: `GET /` is the names,
    `GET /NAME` a file."""

    async def names(_: web.Request) -> web.Response:
        return web.json_response(sorted(name for name in os.listdir(directory) if _NAME.fullmatch(name)))

    async def file(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        try:
            path = confined(str(directory / name), [directory])
        except OutsideError as error:
            return web.Response(status=403, text=str(error))
        if not _NAME.fullmatch(name) or not path.is_file():
            return web.Response(status=404, text=f"no weights {name[:200]!r} here")
        return web.FileResponse(path, chunk_size=CHUNK)

    app = web.Application(middlewares=[guard(token, lambda status, why: web.Response(status=status, text=why))])
    app.add_routes([web.get("/", names), web.get("/{name}", file)])
    return app


async def serve(directory: Path, sock: socket.socket, token: str) -> Callable[[], Awaitable[None]]:
    """Serve `directory` on a listening socket; returns what ends that (to be awaited)."""
    runner = web.AppRunner(application(directory, token), access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    return runner.cleanup
