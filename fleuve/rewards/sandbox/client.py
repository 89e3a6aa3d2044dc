"""The verifier's side: starts the fork server, opens sandboxes, runs programs in them, and ends them in time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fleuve.rewards.sandbox import namespaces
from fleuve.rewards.sandbox.inside import receive, send
from fleuve.rewards.sandbox.limits import Limits
from fleuve.rewards.sandbox.watch import usage

START_SECONDS = 20.0
ANSWER_SECONDS = 10.0
_TICK = 0.02
_CHUNK = 65536
_SEALS = getattr(fcntl, "F_SEAL_WRITE", 8) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SHRINK", 2)
_STARVED = 0.5
_START = "import sys; sys.path.insert(0, {!r}); from fleuve.rewards.sandbox.server import main; main()"


class SandboxError(RuntimeError):
    """A sandbox could not be started, or ended by no doing of its program: nothing can be said about the program."""


class SandboxServer:
    """The fork server of one verifier process. Not for several threads."""

    def __init__(self, level: str, roles: Mapping[str, str]) -> None:
        """`roles`: name → `module:function`, what a program's process can be told to do; the modules may import the
        standard library and each other alone.

        Raises:
            SandboxError: it cannot be started, or this machine cannot build these walls; the message says why.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = {"socket": theirs.fileno(), "level": level, "roles": [f"{k}={v}" for k, v in roles.items()]}
        root = str(Path(__file__).parents[3])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", "-c", _START.format(root), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Sets come out in the same order in every run.
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp"},
                cwd="/",
            )
        try:
            answer = self._receive(START_SECONDS)
            if "entered" in answer:
                namespaces.write_maps(self._process.pid)
                answer = self._ask({"mapped": True}, timeout=START_SECONDS)
            if "ready" not in answer:
                raise SandboxError(f"the sandbox server did not start: {answer.get('error', answer)}")
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox server did not start: {error}") from None
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> SandboxServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server and every sandbox."""
        self._control.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, limits: Limits) -> Sandbox:
        """A new sandbox, with an empty scratch folder.

        Raises:
            SandboxError: it cannot be had.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                pid = self._ask({"open": limits.encoded()}, (theirs.fileno(),)).get("pid")
        except BaseException:
            ours.close()
            raise
        if pid is None:
            ours.close()
            raise SandboxError("the sandbox server could not fork a sandbox")
        return Sandbox(self, pid, ours, limits)

    def end(self, pid: int) -> None:
        """Kill a sandbox with all its processes, and wait until they are gone."""
        self._ask({"close": pid})

    def _ask(
        self, message: Mapping[str, Any], fds: tuple[int, ...] = (), timeout: float = ANSWER_SECONDS
    ) -> dict[str, Any]:
        try:
            send(self._control, message, fds)
        except OSError as error:
            raise SandboxError(f"the sandbox server has ended: {error}") from None
        return self._receive(timeout)

    def _receive(self, timeout: float) -> dict[str, Any]:
        self._control.settimeout(timeout)
        try:
            message, _ = receive(self._control)
        except TimeoutError:
            raise SandboxError(f"the sandbox server did not answer for {timeout:g} s") from None
        except OSError as error:
            raise SandboxError(f"the sandbox server has ended: {error}") from None
        if message is None:
            raise SandboxError("the sandbox server has ended")
        return message


class Sandbox:
    """One place for one check's programs. A context manager: leaving it ends everything inside."""

    def __init__(self, server: SandboxServer, pid: int, control: socket.socket, limits: Limits) -> None:
        self.pid, self.limits = pid, limits
        self._server, self._control = server, control

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(SandboxError):
            self._server.end(self.pid)
        self._control.close()

    def start(self, role: str, job: Mapping[str, Any], stdin: bytes = b"", extra: Sequence[int] = ()) -> Run:
        """Start a program; one at a time. `extra` descriptors become its 3, 4, …

        Raises:
            SandboxError: the sandbox has ended.
        """
        output, their_output = os.pipe()
        errors, their_errors = os.pipe()
        job_fd, input_fd = _sealed(json.dumps(job).encode()), _sealed(stdin)
        try:
            send(self._control, {"role": role}, (job_fd, input_fd, their_output, their_errors, *extra))
        except OSError as error:
            os.close(output)
            os.close(errors)
            raise SandboxError(f"the sandbox has ended: {error}") from None
        finally:
            for fd in (their_output, their_errors, job_fd, input_fd):
                os.close(fd)
        return Run(self, output, errors)


class Run:
    """A program that runs, or has run. `status` is None until it has ended: its exit status, or minus a signal."""

    def __init__(self, sandbox: Sandbox, output: int, errors: int) -> None:
        self.sandbox = sandbox
        self.status: int | None = None
        self.written = 0
        self._kept: dict[int, bytearray] = {output: bytearray(), errors: bytearray()}
        self._open = {output, errors}
        self._output, self._errors = output, errors

    @property
    def output(self) -> bytes:
        """What it wrote to stdout, as far as its limit lets."""
        return bytes(self._kept[self._output])

    @property
    def errors(self) -> bytes:
        """What it wrote to stderr."""
        return bytes(self._kept[self._errors])

    def close(self) -> None:
        for fd in list(self._open):
            self._close(fd)

    def fds(self) -> list[int]:
        """What to wait for: its two streams, and word of its end."""
        return [*self._open, *([self.sandbox._control.fileno()] if self.status is None else [])]

    def take(self, fd: int) -> None:
        """Read what lies there.

        Raises:
            SandboxError: the sandbox ended before it reported the program's end.
        """
        if fd in self._open:
            data = os.read(fd, _CHUNK)
            self.written += len(data)
            if not data:
                self._close(fd)
            elif len(self._kept[fd]) <= self.sandbox.limits.output:
                self._kept[fd] += data
            return
        message, _ = receive(self.sandbox._control)
        if message is None:
            raise SandboxError("the sandbox ended before its program")
        self.status = message["status"]
        # All its processes are gone, so all that they wrote lies in the pipes.
        for rest in list(self._open):
            while rest in self._open and self.written <= self.sandbox.limits.output:
                self.take(rest)
        self.close()

    def _close(self, fd: int) -> None:
        self._open.discard(fd)
        os.close(fd)


def supervise(runs: Sequence[Run], until: Run, seconds: float, deadline: float) -> str:
    """Wait for the end of `until`. Returns "" or the limit that was reached first: "time", "cpu", "memory", "processes"
    or "output". `seconds` it may take, not counting those in which it would have run and got no core; `deadline`, a
    time of `time.monotonic`, ends it in any case.

    Raises:
        SandboxError: a sandbox ended by itself, or its programs hardly got a core before the deadline.
    """
    started = looked = time.monotonic()
    end = min(started + seconds, deadline)
    poll = select.poll()
    while until.status is None:
        now = time.monotonic()
        if now >= end:
            waited = max(usage(run.sandbox.pid).waited for run in runs)
            if now < deadline and started + seconds + waited > now + _TICK:
                end = min(started + seconds + waited, deadline)
                continue
            if now >= deadline and waited > _STARVED * (now - started):
                raise SandboxError(f"the program waited {waited:.1f} of {now - started:.1f} s for a core")
            return "time"
        watched = {fd: run for run in runs for fd in run.fds()}
        for fd in watched:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(1000 * min(_TICK, end - now))
        for fd in watched:
            poll.unregister(fd)
        for fd, _ in ready:
            run = watched[fd]
            if fd in run.fds():
                run.take(fd)
            if run.written > run.sandbox.limits.output:
                return "output"
        if time.monotonic() - looked > _TICK:
            looked = time.monotonic()
            for run in runs:
                if reason := _over(run):
                    return reason
    return ""


def describe(status: int) -> str:
    """A program's end in words."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


def _over(run: Run) -> str:
    used, limits = usage(run.sandbox.pid), run.sandbox.limits
    if used.memory > limits.memory:
        return "memory"
    if used.ran > limits.cpu_seconds:
        return "cpu"
    return "processes" if used.processes > limits.processes + 1 else ""


def _sealed(data: bytes) -> int:
    """A file in memory that nobody can change any more."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    fcntl.fcntl(fd, getattr(fcntl, "F_ADD_SEALS", 1033), _SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
