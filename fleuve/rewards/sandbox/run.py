"""A program that runs: what it writes, how it ends, and the limits it is held to."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleuve.rewards.sandbox.inside import receive
from fleuve.rewards.sandbox.limits import Limits
from fleuve.rewards.sandbox.watch import Usage, Watch

_TICK = 0.02
_CHUNK = 65536


class SandboxError(RuntimeError):
    """A sandbox could not be started, or ended by no doing of its program: nothing can be said about the program."""


class Ending(NamedTuple):
    """Of a program: "", or the limit that was reached first ("time", "cpu", "memory", "processes", "output") while it
    still runs; and the seconds that it took, not counting those in which it would have run and got no core."""

    limit: str
    seconds: float


class Run:
    """A program that runs, or has run. `status` is None until it has ended: its exit status, or minus a signal."""

    def __init__(self, sandbox: int, control: socket.socket, limits: Limits, output: int, errors: int) -> None:
        self.sandbox, self.limits = sandbox, limits
        self._control = control
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
        return [*self._open, *([self._control.fileno()] if self.status is None else [])]

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
            elif len(self._kept[fd]) <= self.limits.output:
                self._kept[fd] += data
            return
        message, _ = receive(self._control)
        if message is None:
            raise SandboxError("the sandbox ended before its program")
        self.status = message["status"]
        # All its processes are gone, so all that they wrote lies in the pipes.
        for rest in list(self._open):
            while rest in self._open and self.written <= self.limits.output:
                self.take(rest)
        self.close()

    def _close(self, fd: int) -> None:
        self._open.discard(fd)
        os.close(fd)


def supervise(runs: Sequence[Run], until: Run, seconds: float, check: Callable[[float, float], None]) -> Ending:
    """Wait for the end of `until`. `seconds` it may take, not counting those in which it would have run and got no
    core. `check(now, taken)` is called again and again with the time that it has taken so far, and may raise.

    Raises:
        SandboxError: a sandbox ended by itself.
    """
    started = looked = time.monotonic()
    watches = {run: Watch(run.sandbox, started) for run in runs}
    waited = 0.0
    poll = select.poll()
    while until.status is None:
        now = time.monotonic()
        if now - looked >= _TICK:
            looked, waited = now, 0.0
            for run, watch in watches.items():
                used = watch.look(now)
                waited += used.waited  # they take turns: when one waits for a core, the other waits for it
                if limit := _over(used, run.limits):
                    return Ending(limit, now - started - waited)
            taken = max(0.0, now - started - waited)
            if taken >= seconds:
                return Ending("time", taken)
            check(now, taken)
        watched = {fd: run for run in runs for fd in run.fds()}
        for fd in watched:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(1000 * _TICK)
        for fd in watched:
            poll.unregister(fd)
        for fd, _ in ready:
            run = watched[fd]
            if fd in run.fds():
                run.take(fd)
            if run.written > run.limits.output:
                return Ending("output", time.monotonic() - started - waited)
    return Ending("", time.monotonic() - started - waited)


def describe(status: int) -> str:
    """A program's end in words."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


def _over(used: Usage, limits: Limits) -> str:
    if used.memory > limits.memory:
        return "memory"
    if used.ran > limits.cpu_seconds:
        return "cpu"
    return "processes" if used.processes > limits.processes + 1 else ""
