"""A verifier process, just forked: reads a check, runs it, answers; one at a time.

Its socket is out of reach of user code's `print` and of the processes that user code starts: what they write to stdout
goes to the log.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import socket
import sys
from functools import partial
from typing import Any, BinaryIO, NoReturn

from fleuve.errors import UserError
from fleuve.launch.child import follow
from fleuve.rewards.code import installed
from fleuve.rewards.protocol import (
    HEADER,
    Check,
    Promise,
    Ready,
    Result,
    Taken,
    WorkerOptions,
    decode,
    frame,
    length,
    sayable,
)
from fleuve.rewards.verifiers import begin, prepare, run


def work(pool: socket.socket, lifeline: int | None, options: WorkerOptions) -> NoReturn:
    """Check until the pool closes `pool`, then end, with everything that user code has left running. The process leads
    its own group already; it also ends with whoever holds `lifeline`."""
    try:
        if lifeline is not None:
            follow(lifeline, lambda: None)
        descriptor = pool.detach()
        os.register_at_fork(after_in_child=partial(_close, descriptor))
        _reseed()
        if options.memory:
            _limit(resource.RLIMIT_DATA, options.memory)
        with open(descriptor, "rb", closefd=False) as source, open(descriptor, "wb", closefd=False) as sink:
            _serve(source, sink, options)
    except ConnectionError:  # the pool is gone
        pass
    finally:
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)  # not reached


def prepare_all(names: tuple[str, ...]) -> str:
    """Load these verifiers; what is wrong with one of them, or ""."""
    try:
        for name in names:
            prepare(name)
    except UserError as failure:
        return sayable(str(failure))
    return ""


def _serve(source: BinaryIO, sink: BinaryIO, options: WorkerOptions) -> None:
    error = prepare_all(options.verifiers) if options.late else ""
    for name in options.verifiers:
        begin(name)
    installed.tell(lambda seconds: _send(sink, Promise(seconds=seconds)))
    _send(sink, Ready(error=error))
    while (check := _receive(source)) is not None:
        _allow_cpu(options.cpu_seconds)
        _send(sink, Taken())
        score, reason = run(check.verifier, check.text, check.answer, check.row)
        _send(sink, Result(score=score, reason=sayable(reason), memory=_own_memory()))


def _receive(source: BinaryIO) -> Check | None:
    header = source.read(HEADER)
    return decode(source.read(length(header)), Check) if len(header) == HEADER else None


def _send(sink: BinaryIO, message: Any) -> None:
    sink.write(frame(message))
    sink.flush()


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _reseed() -> None:
    """Forked from one parent, the workers would all draw the same numbers. (Python's own generator sees to itself.)"""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()


def _own_memory() -> int:
    """Resident bytes that are in no file: heap and stacks, those shared with the nursery among them. 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            resident, shared = file.read().split()[1:3]
        return (int(resident) - int(shared)) * resource.getpagesize()
    return 0


def _allow_cpu(seconds: float) -> None:
    """Bound this process's CPU time from here: past it the kernel ends it, even inside one endless C call."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime + seconds))


def _limit(which: int, value: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # the machine's own limit is lower, which serves as well
        resource.setrlimit(which, (value, resource.getrlimit(which)[1]))
