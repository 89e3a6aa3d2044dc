"""The nursery: `python -m fleuve.rewards.forkserver '{...}'` loads the verifiers once and forks workers of itself.

It is the only one here that forks, so it has one thread and stays with it: a lock that another thread holds at a fork
would be held in the child for ever. It sees workers end, ends what they leave behind in their process groups, and
when the pool is gone it kills all of them, even one that is stuck in an endless C call.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
from typing import BinaryIO, NoReturn

import msgspec

from fleuve.launch.child import LIFELINE_VARIABLE, lifeline
from fleuve.rewards.code import installed
from fleuve.rewards.protocol import Ended, Forked, Ready, WorkerOptions, frame
from fleuve.rewards.verifiers import BUILT_IN
from fleuve.rewards.worker import prepare_all, work


def main() -> None:
    line = lifeline()
    options = msgspec.json.decode(sys.argv[1], type=WorkerOptions)
    requests, reports = _private_streams()
    if options.path is not None:
        sys.path.insert(1, os.path.abspath(options.path))  # the first is the current directory
    installed.configure(options.code)
    names = tuple(name for name in options.verifiers if name in BUILT_IN) if options.late else options.verifiers
    error = prepare_all(names)
    if not error and not options.late and _threads() > 1:
        _begin_anew(msgspec.structs.replace(options, late=True), line, requests, reports)
    _report(reports, Ready(error=error))
    if not error:
        ForkServer(options, line, requests, reports).run()


class ForkServer:
    """Forks on request, reports ends; `run` returns when the pool is gone."""

    def __init__(self, options: WorkerOptions, line: int | None, requests: socket.socket, reports: BinaryIO) -> None:
        self._options = options
        self._line = line
        self._requests = requests
        self._reports = reports
        self._workers: set[int] = set()
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        gc.collect()
        gc.freeze()  # a collection in a worker would otherwise touch, and so copy, every page it shares with this one
        watched = [self._requests.fileno(), self._wake, *([self._line] if self._line is not None else [])]
        try:
            while True:
                readable, _, _ = select.select(watched, [], [])
                if self._wake in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._bury()
                if self._line in readable or (self._requests.fileno() in readable and not self._answer()):
                    return
        except ConnectionError:  # the pool is gone
            return
        finally:
            for pid in self._workers:
                _kill_group(pid)

    def _answer(self) -> bool:
        """Fork for one request; False if there will be no more."""
        data, descriptors, _, _ = socket.recv_fds(self._requests, 1, 1)
        if not data:
            return False
        if not descriptors:
            _report(self._reports, Forked(pid=0, error="the request came without a socket"))
            return True
        with socket.socket(fileno=descriptors[0]) as pool:
            try:
                pid = os.fork()
            except OSError as error:
                _report(self._reports, Forked(pid=0, error=f"cannot fork: {error.strerror}"))
                return True
            if pid == 0:
                self._become_worker(pool)
            with contextlib.suppress(OSError):  # both set it, so that it is true whoever comes first
                os.setpgid(pid, pid)
        self._workers.add(pid)
        _report(self._reports, Forked(pid=pid))
        return True

    def _become_worker(self, pool: socket.socket) -> NoReturn:
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._requests.close()
            self._reports.close()
            os.close(self._wake)
            pool.set_inheritable(False)
            work(pool, self._line, self._options)
        finally:
            os._exit(70)

    def _bury(self) -> None:
        """Reap the workers that have ended. The group is killed first, while its number cannot be another's yet."""
        for pid in list(self._workers):
            if hasattr(os, "waitid") and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            if hasattr(os, "waitid"):
                _kill_group(pid)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            self._workers.discard(pid)
            _report(self._reports, Ended(pid=pid, status=os.waitstatus_to_exitcode(status)))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _report(reports: BinaryIO, message: Ready | Forked | Ended) -> None:
    reports.write(frame(message))
    reports.flush()


def _private_streams() -> tuple[socket.socket, BinaryIO]:
    """Requests come on stdin, reports go to stdout; both move to where neither print nor a child process reaches."""
    requests, reports = socket.socket(fileno=os.dup(0)), os.fdopen(os.dup(1), "wb")  # dup: not inherited by children
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, reports


def _threads() -> int:
    """Threads of this process, those of libraries too."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _begin_anew(options: WorkerOptions, line: int | None, requests: socket.socket, reports: BinaryIO) -> NoReturn:
    """Replace this program by itself, without the threads that a verifier's module has started."""
    print("a verifier's module starts threads when it is imported: each worker imports it for itself", file=sys.stderr)
    sys.stderr.flush()
    os.dup2(requests.fileno(), 0)
    os.dup2(reports.fileno(), 1)
    if line is not None:
        os.set_inheritable(line, True)
        os.environ[LIFELINE_VARIABLE] = str(line)
    argument = msgspec.json.encode(options).decode()
    os.execv(sys.executable, [sys.executable, "-m", "fleuve.rewards.forkserver", argument])


if __name__ == "__main__":
    main()
