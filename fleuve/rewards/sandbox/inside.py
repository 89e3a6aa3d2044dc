"""A sandbox's first process: forks programs, one after the other, and reports how each ended.

It holds no secret: what a program must not know never comes in here. Its programs run as processes of their own, and
all that one leaves running is killed before the next starts. When this process ends, the kernel ends whatever is left
in its process namespace.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import json
import mmap
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TextIO, cast

from fleuve.rewards.sandbox import filter, syscalls
from fleuve.rewards.sandbox.limits import Limits, apply
from fleuve.rewards.sandbox.namespaces import Walls, drop_privileges, new_scratch

Role = Callable[[dict[str, Any]], int]
"""What a program's process does with its job: returns the exit status. Descriptors 0 to 2 are its standard streams; the
others that it was given follow from 3."""

MESSAGE = 65536
_SERVERS_OWN = 6
"""At most: the fork server, two sandboxes' first processes, and the examiner beside a candidate, with room to spare."""


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One message and the descriptors that came with it; None at the end."""
    try:
        body, ancillary, _, _ = control.recvmsg(MESSAGE, socket.CMSG_SPACE(16 * 4))
    except ConnectionResetError:  # the other side was killed before it had read what lay there for it
        return None, []
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return (json.loads(body) if body else None), list(fds)


def send(control: socket.socket, message: Mapping[str, Any], fds: tuple[int, ...] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    control.sendmsg([json.dumps(message).encode()], rights)


def serve(control: socket.socket, limits: Limits, walls: Walls | None, roles: Mapping[str, Role]) -> NoReturn:
    """The first process's whole life. `walls` None: without namespaces."""
    status = 1
    began = mmap.mmap(-1, 1)  # shared with the forked: whether a program had all around it that belongs there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a handler is what would let a program signal its init
    try:
        if walls is None:
            syscalls.adopt_orphans()
        else:
            new_scratch(walls, limits.scratch, limits.files)
        syscalls.die_with_parent()
        while True:
            message, fds = receive(control)
            if message is None:
                break
            began[0] = 0
            pid = os.fork()
            if pid == 0:
                _become_program(message["role"], fds, limits, walls, roles, began)
            for fd in fds:
                os.close(fd)
            status = _wait(pid)
            end_descendants(walls is not None)
            if not began[0]:  # no fault of the program's: that this process ends says so
                raise RuntimeError(f"a program could not be started (status {status})")
            send(control, {"status": status})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def end_descendants(namespaces: bool) -> None:
    """Kill what a program has left running, and wait until it is gone."""
    while True:
        if namespaces:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all that this process namespace holds but this process
        else:
            for pid in children(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found.extend(map(int, file.read().split()))
    return found


def _wait(pid: int) -> int:
    """The exit status of one child, whatever other ends in between: minus the signal's number if one killed it."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _become_program(
    role: str, fds: list[int], limits: Limits, walls: Walls | None, roles: Mapping[str, Role], began: mmap.mmap
) -> NoReturn:
    """In the forked child: the program's job first, then nothing of this process is left to it but its limits."""
    status = 70
    try:
        # A group reaches across process namespaces: in its parent's, the program could kill all of that user's.
        os.setsid()
        job_fd, *kept = fds
        with open(job_fd, "rb", closefd=False) as file:
            job = json.loads(file.read())
        moved = [os.dup(fd) for fd in kept] if min(kept) < len(kept) else kept
        for target, fd in enumerate(moved):
            os.dup2(fd, target)
        os.closerange(len(moved), max(256, max(moved) + 1))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        apply(limits, _SERVERS_OWN if walls is None or not walls.own_user else 1)
        if walls is None:
            syscalls.give_up_privileges()
            syscalls.die_with_parent()
        else:
            drop_privileges(walls)
        filter.install()
        sys.stdin = sys.__stdin__ = _stream(0, "r")  # type: ignore[assignment, misc]
        sys.stdout = sys.__stdout__ = _stream(1, "w")  # type: ignore[assignment, misc]
        sys.stderr = sys.__stderr__ = _stream(2, "w")  # type: ignore[assignment, misc]
        gc.enable()
        began[0] = 1
        began.close()
        status = roles[role](job)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter that ends does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = status or 1
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(status & 0xFF)


def _stream(fd: int, mode: str) -> TextIO:
    return cast(TextIO, open(fd, mode, encoding="utf-8", errors="replace", closefd=False))
