"""The verifier's side: starts the fork server, opens sandboxes, runs programs in them, and ends them in time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fleuve.rewards.sandbox import namespaces
from fleuve.rewards.sandbox.inside import receive, send
from fleuve.rewards.sandbox.limits import Limits
from fleuve.rewards.sandbox.run import Run, SandboxError

START_SECONDS = 20.0
ANSWER_SECONDS = 10.0
_SEALS = getattr(fcntl, "F_SEAL_WRITE", 8) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SHRINK", 2)
_START = "import sys; sys.path.insert(0, {!r}); from fleuve.rewards.sandbox.server import main; main()"


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
        return Run(self.pid, self._control, self.limits, output, errors)


def _sealed(data: bytes) -> int:
    """A file in memory that nobody can change any more."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    fcntl.fcntl(fd, getattr(fcntl, "F_ADD_SEALS", 1033), _SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
