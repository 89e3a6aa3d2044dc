"""A child process on this machine: started with its socket already bound, watched, and ended with all it started."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from fleuve.launch.child import CPUS_VARIABLE, SOCKET_VARIABLE, spawn_arguments
from fleuve.wire.guard import TOKEN_VARIABLE

# Transparent huge pages for malloc, and freed memory kept for reuse: large copies and matrix products run faster.
_HUGE_PAGES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:"
    "glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=67108864"
)
_BACKLOG = 1024
_TAIL_LINES = 20
_POLL_SECONDS = 0.1
_STOPPED_LOOKS, _STOPPED_SECONDS = 10, 1.0
"""Looks in a row, and seconds between two, after which a process that is stopped is not waited for any more."""


class ChildError(RuntimeError):
    """A child process died, or did not come up in time. The message names it, its log, and the log's last lines."""

    def __init__(self, name: str, what: str, log_path: Path) -> None:
        self.name = name
        self.what = what
        self.log_path = log_path
        tail = log_tail(log_path)
        ending = f"; the last lines of {log_path}:\n{tail}" if tail else f"; {log_path} is empty"
        super().__init__(f"{name} {what}{ending}")


class LostAtStartError(ChildError):
    """A signal ended it before it answered, or it stood still: nothing that would have to happen again."""


class ChildProcess:
    """One process of ours: `python -m module '<options as JSON>'`, in its own session, writing to its own log."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        log_path: Path,
        url: str,
        token: str | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.url = url
        self.token = token
        """What its server wants to be shown (`wire.guard`)."""
        self._process = process
        self._stopping = False

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        options: Mapping[str, Any],
        log_path: Path,
        *,
        cpus: Collection[int] | None = None,
        threads: int = 1,
        with_socket: bool = True,
        env: Mapping[str, str] | None = None,
        huge_pages: bool = True,
        start_timeout: float = 180.0,
        address: str = "127.0.0.1",
        ports: tuple[int, int] | None = None,
    ) -> ChildProcess:
        """Start a child and, if it has a socket, wait until its `GET /health` answers 200.

        The socket is bound here and inherited by the child: nobody can take the port in between, and a request sent
        before the child listens waits instead of being refused. `cpus` None leaves it on all of them. Its server gets a
        token of its own through the environment, which other accounts of this machine cannot read. It listens on
        `address`, on any free port, or the first free one from `ports[0]` to `ports[1]`.

        Raises:
            ChildError: it died before it answered.
            LostAtStartError: a signal ended it, it was stopped, or it did not answer within `start_timeout` seconds.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        extra = thread_environment(threads, huge_pages) | dict(env or {})
        if cpus:
            extra[CPUS_VARIABLE] = ",".join(str(cpu) for cpu in sorted(cpus))
        sock = _bind(address, ports) if with_socket else None
        url = f"http://{address}:{sock.getsockname()[1]}" if sock else ""
        token = secrets.token_urlsafe() if sock else None
        if sock and token:
            extra |= {SOCKET_VARIABLE: str(sock.fileno()), TOKEN_VARIABLE: token}
        try:
            with log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    module,
                    json.dumps(dict(options)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    **spawn_arguments(extra, pass_fds=[sock.fileno()] if sock else []),
                )
            child = cls(name, process, log_path, url, token)
            try:
                if sock:
                    await child._wait_until_healthy(start_timeout)
            except BaseException:
                await child.stop(grace=0)
                raise
            return child
        finally:
            if sock:
                sock.close()  # only the child's copy is left: when it dies, connections are refused at once

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def ending(self) -> str:
        """`exit status 3`, or `killed by SIGKILL`; empty while it lives."""
        status = self._process.returncode
        return "" if status is None else describe_status(status)

    async def wait(self) -> int:
        """The exit status, negative for a signal; waits for the end."""
        return await self._process.wait()

    async def died(self) -> ChildError:
        """Waits until the child ends without having been told to, and returns the error that says so.

        For `raise await child.died()` in a task beside the work. Never returns for a child that `stop` ended.
        """
        status = await self.wait()
        if self._stopping:
            await asyncio.Event().wait()
        return ChildError(self.name, f"(pid {self.pid}) died: {describe_status(status)}", self.log_path)

    async def stop(self, grace: float = 5.0) -> int:
        """SIGTERM, then after `grace` seconds SIGKILL; whatever the child has left in its group is killed too."""
        self._stopping = True
        if self.alive and grace > 0:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), grace)
        self.kill()
        return await self.wait()

    def kill(self) -> None:
        """SIGKILL to the child's whole group, at once; may be called again, and after the child has ended."""
        self._stopping = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _wait_until_healthy(self, timeout: float) -> None:
        healthy = asyncio.create_task(_poll_health(f"{self.url}/health"))
        ended = asyncio.create_task(self.wait())
        stopped = asyncio.create_task(_until_stopped(self.pid))
        tasks: set[asyncio.Task[Any]] = {healthy, ended, stopped}
        try:
            done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if healthy in done:
            return
        if ended in done:
            status = ended.result()
            kind = LostAtStartError if status < 0 else ChildError
            raise kind(self.name, f"died while starting: {describe_status(status)}", self.log_path)
        why = f"is stopped (pid {self.pid})" if stopped in done else f"did not answer GET /health within {timeout:g} s"
        raise LostAtStartError(self.name, why, self.log_path)


def thread_environment(threads: int, huge_pages: bool = True) -> dict[str, str]:
    """Environment of a process that computes with `threads` threads.

    `OMP_WAIT_POLICY=PASSIVE`: threads that wait do not spin on cores that another process needs.
    """
    count = str(threads)
    env = {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if huge_pages and sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        env["GLIBC_TUNABLES"] = _HUGE_PAGES
    return env


def describe_status(status: int) -> str:
    """`exit status 3`, or `killed by SIGKILL`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def log_tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last `lines` lines of a log, read from its last 16 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _bind(address: str, ports: tuple[int, int] | None) -> socket.socket:
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((address, port))
            sock.listen(_BACKLOG)
            return sock
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE or port == last:
                raise
        except BaseException:
            sock.close()
            raise
    raise ValueError(f"no ports from {first} to {last}")


def is_stopped(pid: int) -> bool:
    """Whether a process stands still by a signal (SIGSTOP, a debugger); False where that cannot be told."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")  # the name before it may hold anything
    except OSError:
        return False


async def _until_stopped(pid: int) -> None:
    """Ends when the process has been found stopped several times in a row."""
    looks = 0
    while looks < _STOPPED_LOOKS:
        await asyncio.sleep(_STOPPED_SECONDS)
        looks = looks + 1 if is_stopped(pid) else 0


async def _poll_health(url: str) -> None:
    """Ends when `url` answers 200. The caller sets the deadline."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_POLL_SECONDS)
