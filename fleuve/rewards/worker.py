"""A verifier process: `python -m fleuve.rewards.worker '{...}'`. Reads a check, runs it, answers; one at a time.

The protocol moves to descriptors that neither user code's `print` nor its child processes can reach: what they write
to stdout goes to stderr.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from fleuve.errors import UserError
from fleuve.launch.child import adopt
from fleuve.rewards.code import installed
from fleuve.rewards.protocol import HEADER, Check, Ready, Result, WorkerOptions, decode, frame, length
from fleuve.rewards.verifiers import begin, prepare, run


def main() -> None:
    # User code may start processes that do not adopt: the whole group has to end with the parent.
    adopt(on_orphaned=lambda: None)
    options = msgspec.json.decode(sys.argv[1], type=WorkerOptions)
    source, sink = _private_streams()
    if options.memory:
        _limit(resource.RLIMIT_DATA, options.memory)
    if options.path is not None:
        sys.path.insert(1, os.path.abspath(options.path))  # the first is the current directory
    installed.configure(options.code)
    error = ""
    try:
        for name in options.verifiers:
            prepare(name)
            begin(name)
    except UserError as failure:
        error = str(failure)
    _send(sink, Ready(error=error))
    while (check := _receive(source)) is not None:
        _allow_cpu(options.cpu_seconds)
        score, reason = run(check.verifier, check.text, check.answer, check.row)
        _send(sink, Result(score=score, reason=reason))
    # The pool has closed the pipe: end with everything that user code has left running.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")  # dup: not inherited by children
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return source, sink


def _receive(source: BinaryIO) -> Check | None:
    header = source.read(HEADER)
    return decode(source.read(length(header)), Check) if len(header) == HEADER else None


def _send(sink: BinaryIO, message: Ready | Result) -> None:
    sink.write(frame(message))
    sink.flush()


def _allow_cpu(seconds: float) -> None:
    """Bound this process's CPU time from here: past it the kernel ends it, even inside one endless C call."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime + seconds))


def _limit(which: int, value: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # the machine's own limit is lower, which serves as well
        resource.setrlimit(which, (value, resource.getrlimit(which)[1]))


if __name__ == "__main__":
    main()
