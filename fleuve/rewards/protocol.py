"""What pool and worker say to each other: length-prefixed msgpack over the worker's stdin and stdout."""

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
    """The worker's one argument, as JSON. `cpu_seconds` bounds one check even if nobody is left to kill it; `memory`
    bounds the process, in bytes (0: no bound). `path` is a directory to import from, after the current one."""

    verifiers: tuple[str, ...]
    cpu_seconds: float
    memory: int = 0
    path: str | None = None
    code: CodeOptions = CodeOptions()


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker's first word: its verifiers are loaded, or `error` says why not."""

    error: str = ""


class Check(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One answer to be scored."""

    verifier: str
    text: str
    answer: str
    row: dict[str, Any]


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of a check: a score, or none and why."""

    score: float | None
    reason: str = ""


def frame(message: Any) -> bytes:
    """One message with its length before it."""
    body = encode(message)
    return len(body).to_bytes(HEADER, "big") + body


def length(header: bytes) -> int:
    """The bytes that follow a header.

    Raises:
        ValueError: longer than `MAX_FRAME`.
    """
    size = int.from_bytes(header, "big")
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes: the stream is corrupt")
    return size


__all__ = ["HEADER", "Check", "Ready", "Result", "WorkerOptions", "decode", "frame", "length"]
