"""What ties a child process to its parent: it ends when the parent ends, however the parent ends.

The parent holds the only write end of a pipe, the lifeline; each child inherits the read end. When the parent is gone,
even by SIGKILL, the kernel closes the write end and every child reads end-of-file. Grandchildren hang on their own
parent's lifeline, so the end travels down the tree. Two sides:

    parent:  asyncio.create_subprocess_exec(sys.executable, "-m", module, **spawn_arguments())
    child:   adopt()          # first thing in main
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LIFELINE_VARIABLE = "FLEUVE_LIFELINE_FD"
SOCKET_VARIABLE = "FLEUVE_SOCKET_FD"
CPUS_VARIABLE = "FLEUVE_CPUS"

_CLEAN_UP_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1

_lifeline: tuple[int, int] | None = None  # (read end, write end) of this process as a parent
_lifeline_lock = threading.Lock()


def spawn_arguments(
    env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = (), own_group: bool = True
) -> dict[str, Any]:
    """Keyword arguments for `subprocess.Popen` or `asyncio.create_subprocess_exec` of a child that calls `adopt`.

    `env` is added to this process's environment. With `own_group` the child leads a session of its own: the terminal's
    Ctrl-C does not reach it, and `os.killpg(child.pid, ...)` ends it with everything it started. Start children from a
    thread that lives as long as they should: to the Linux kernel, that thread is the parent.
    """
    fd = _lifeline_read_end()
    inherited = {k: v for k, v in os.environ.items() if k not in (LIFELINE_VARIABLE, SOCKET_VARIABLE, CPUS_VARIABLE)}
    return {
        "env": inherited | dict(env or {}) | {LIFELINE_VARIABLE: str(fd)},
        "pass_fds": (fd, *pass_fds),
        "start_new_session": own_group,
    }


def adopt(on_orphaned: Callable[[], None] | None = None) -> None:
    """Make this process end with its parent. Does nothing in a process that was started by hand.

    When the parent is gone, `on_orphaned` runs in a thread of its own (it has 5 seconds), then this process and its
    group end. Without `on_orphaned` there is nothing to clean up, and on Linux the kernel also kills this process
    outright, which works even while it is stuck inside one C call. A process whose children do not `adopt` must pass
    `on_orphaned`, be it empty, so that its group is killed and not only itself.

    SIGINT is ignored from here on: Ctrl-C is the parent's to answer. If the parent assigned CPUs, they are taken up.
    """
    fd = lifeline()
    if fd is None:
        return
    if on_orphaned is None:
        end_with_parent(signal.SIGKILL)
    follow(fd, on_orphaned)


def lifeline() -> int | None:
    """For a process that must not have a second thread: what `adopt` does, but the watching is left to the caller. The
    descriptor reads end-of-file when the parent is gone; None in a process that was started by hand."""
    fd_text = os.environ.pop(LIFELINE_VARIABLE, None)
    _take_up_cpus(os.environ.pop(CPUS_VARIABLE, ""))
    if fd_text is None:
        return None
    fd = int(fd_text)
    os.set_inheritable(fd, False)
    end_with_parent(signal.SIGCONT)  # one that is stopped would not read its lifeline, and stay for ever
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return fd


def follow(fd: int, on_orphaned: Callable[[], None] | None = None) -> None:
    """End with whoever holds the other end of `fd`, a `lifeline`, from here on; starts a thread."""
    threading.Thread(target=_watch, args=(fd, on_orphaned), name="lifeline", daemon=True).start()


def listening_socket() -> socket.socket:
    """The bound and listening socket that the parent passed on.

    Raises:
        RuntimeError: the parent passed none.
    """
    fd = os.environ.pop(SOCKET_VARIABLE, None)
    if fd is None:
        raise RuntimeError(f"no listening socket was passed to this process ({SOCKET_VARIABLE} is not set)")
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def has_listening_socket() -> bool:
    """Whether the parent passed a socket (False in a process started by hand)."""
    return SOCKET_VARIABLE in os.environ


def _lifeline_read_end() -> int:
    global _lifeline
    with _lifeline_lock:
        if _lifeline is None:
            _lifeline = os.pipe()  # both ends close on exec, so no child ever holds the write end
        return _lifeline[0]


def _forget_lifeline() -> None:
    """A forked child must not keep its parent's write end open, nor hand it on as its own."""
    global _lifeline
    if _lifeline is not None:
        for fd in _lifeline:
            with contextlib.suppress(OSError):
                os.close(fd)
        _lifeline = None


os.register_at_fork(after_in_child=_forget_lifeline)


def _watch(fd: int, on_orphaned: Callable[[], None] | None) -> None:
    with contextlib.suppress(OSError):
        while os.read(fd, 1):
            pass
    if on_orphaned is not None:
        thread = threading.Thread(target=on_orphaned, name="orphaned", daemon=True)
        thread.start()
        thread.join(_CLEAN_UP_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def end_with_parent(send: signal.Signals) -> None:
    """The kernel sends this process `send` then."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(send), 0, 0, 0)


def _take_up_cpus(cpus: str) -> None:
    """Bind every thread of this process (libraries may have started some at import) to `cpus`, such as `0,2`."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    wanted = {int(cpu) for cpu in cpus.split(",")}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended, or a container forbids it: the run goes on unbound
            os.sched_setaffinity(int(thread), wanted)
