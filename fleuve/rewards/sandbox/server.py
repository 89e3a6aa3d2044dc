"""The fork server: one warm interpreter that forks a sandbox's first process for each check.

Started by `client`, with its control socket as a descriptor. It never sees a program, an input or an output: those go
by descriptors that it passes through, so nothing of one check can be found in the memory that the next one inherits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import site
import socket
import sys
import tempfile
from typing import Any

from fleuve.rewards.sandbox import namespaces, syscalls
from fleuve.rewards.sandbox.inside import Role, end_descendants, receive, send, serve
from fleuve.rewards.sandbox.limits import Limits, lift_cpu_limit
from fleuve.rewards.sandbox.namespaces import Walls

_WARM = (
    "abc array bisect cmath collections collections.abc copy dataclasses datetime decimal enum fractions functools "
    "hashlib heapq io itertools json math numbers operator random re statistics string struct textwrap time typing"
)


def main() -> None:
    """`argv[1]`: `{"socket": descriptor, "level": "namespaces" or "limits", "roles": ["name=module:function"]}`."""
    options = json.loads(sys.argv[1])
    control = socket.socket(fileno=options["socket"])
    walls: Walls | None = None
    try:
        _warm_up()
        roles = dict(_role(text) for text in options["roles"])
        lift_cpu_limit()
        _die_first()
        if options["level"] == "namespaces":
            namespaces.enter()
            send(control, {"entered": True})
            receive(control)
            walls = namespaces.build_root()
        else:
            syscalls.adopt_orphans()
        syscalls.die_with_parent()
    except Exception as error:
        send(control, {"error": f"{type(error).__name__}: {error}"})
        return
    del sys.path[0], sys.argv[1:]
    gc.collect()
    gc.freeze()  # what is here now is looked at by no collection of the forked, and so stays shared
    gc.disable()
    send(control, {"ready": True})
    _loop(control, walls, roles)


def _loop(control: socket.socket, walls: Walls | None, roles: dict[str, Role]) -> None:
    running: dict[int, str] = {}  # with the scratch folder of each, where there are no walls
    while True:
        message, fds = receive(control)
        if message is None:
            break
        if "close" in message:
            pid = message["close"]
            _end(pid, walls, running.pop(pid, ""))
            send(control, {"closed": pid})
            continue
        limits = Limits(**message["open"])
        scratch = ""
        try:
            if walls is None:
                scratch = tempfile.mkdtemp(prefix="fleuve-program-")
            pid = _fork(walls)
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            send(control, {"error": f"cannot fork a sandbox: {error}"})
            continue
        if pid == 0:
            control.close()
            if scratch:
                os.chdir(scratch)
            serve(socket.socket(fileno=fds[0]), limits, walls, roles)
        running[pid] = scratch
        send(control, {"pid": pid})
        for fd in fds:
            os.close(fd)
    for pid, scratch in running.items():
        _end(pid, walls, scratch)


def _fork(walls: Walls | None) -> int:
    if walls is None:
        return os.fork()
    ipc = 0 if walls.quiet else syscalls.NEW_IPC
    return syscalls.clone(syscalls.NEW_PID | syscalls.NEW_MOUNTS | ipc)


def _end(pid: int, walls: Walls | None, scratch: str) -> None:
    """With namespaces, waiting for the first process is waiting for all of them: the kernel reaps them before it."""
    if walls is None:  # what it leaves becomes this process's; all sandboxes of a check are closed together
        end_descendants(namespaces=False)
        shutil.rmtree(scratch, ignore_errors=True)
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _role(text: str) -> tuple[str, Role]:
    name, _, place = text.partition("=")
    module, _, function = place.partition(":")
    role: Any = getattr(importlib.import_module(module), function)
    return name, role


def _warm_up() -> None:
    for name in _WARM.split():
        importlib.import_module(name)
    site.setquit()  # `exit()`: the interpreter was started without `site`
    sys.dont_write_bytecode = True


def _die_first() -> None:
    """If the machine runs out of memory, let it be a program that goes."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
