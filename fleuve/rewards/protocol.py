"""What pool, nursery and workers say to each other: length-prefixed msgpack.

The pool asks its nursery for a worker by sending it one end of a socket pair, and talks to the worker over the other.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fleuve.rewards.code.options import CodeOptions
from fleuve.types import decode, encode

MAX_FRAME = 64 * 1024 * 1024
"""Bytes. A longer frame means that the stream is corrupt."""
HEADER = 4
"""Bytes of the big-endian length before each frame."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The nursery's one argument, as JSON. `cpu_seconds` bounds one check even if nobody is left to kill its worker;
    `memory` bounds a process, in bytes (0: no bound). `path` is a directory to import from, after the current one.
    `late`: your own verifiers are loaded by each worker, because one of them starts threads as it is imported."""

    verifiers: tuple[str, ...]
    cpu_seconds: float
    memory: int = 0
    path: str | None = None
    late: bool = False
    code: CodeOptions = CodeOptions()


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A nursery's or worker's first word: its verifiers are loaded, or `error` says why not."""

    error: str = ""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the nursery, in the order of the requests: a worker's process id (0: `error` says why there is none)."""

    pid: int
    error: str = ""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the nursery: a worker and its process group are gone. `status` is negative for a signal."""

    pid: int
    status: int


class Check(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One answer to be scored."""

    verifier: str
    text: str
    answer: str
    row: dict[str, Any]


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a worker: a check was read and begins now."""


class Promise(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a worker: the check will end within so many `seconds` of when it was taken up. It is the code of this
    package that says so, of programs that wait for a core, and it bounds that."""

    seconds: float


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of a check: a score, or none and why. `memory` is what the worker has allocated of its own by then, in
    resident bytes."""

    score: float | None
    reason: str = ""
    memory: int = 0


def frame(message: Any) -> bytes:
    """One message with its length before it."""
    body = encode(message)
    return len(body).to_bytes(HEADER, "big") + body


def sayable(text: str) -> str:
    """What user code said, with lone surrogates written out: they have no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def length(header: bytes) -> int:
    """The bytes that follow a header.

    Raises:
        ValueError: longer than `MAX_FRAME`.
    """
    size = int.from_bytes(header, "big")
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes: the stream is corrupt")
    return size


__all__ = [
    "HEADER",
    "Check",
    "Ended",
    "Forked",
    "Promise",
    "Ready",
    "Result",
    "Taken",
    "WorkerOptions",
    "decode",
    "frame",
    "length",
    "sayable",
]
