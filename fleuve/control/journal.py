"""What happened to each group, as records: a run that was killed is continued from its last checkpoint and from these.

A record is a frame of `length, checksum, number` and msgpack. Records are numbered without gaps, so that a reader
knows where what it may trust ends: at the first frame that is cut off, damaged, or out of turn. A process that was
killed leaves a frame that is cut off, and nothing behind it; whole frames behind that are a sign of damage.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol

import msgspec

from fleuve.types import (
    Batch,
    FinishReason,
    Float32Array,
    Group,
    Int32Array,
    Prompt,
    StepResult,
    Trajectory,
    Verdict,
    decode,
    encode,
)

_HEADER = struct.Struct("<IIQ")  # bytes of the payload, crc32 of number and payload, number
MAX_RECORD = 1 << 31
"""Bytes; a longer one is damage."""
_NUMBER_AT = 8
"""Where in the header the number is."""
_REACH = 64
"""Records behind damage among which a whole one is looked for."""


class State(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """The ledger at one moment: `source` is the data cursor, `next` the number of the first record after it,
    `evaluated` the version of the last evaluation that was reported, `attempts` counts failed groups by prompt, and
    `without_signal` those in a row that dynamic sampling replaced. The groups alive follow as `Admitted` and `Ready`,
    and what is known of the running ones' answers.
    """

    version: int
    admitted: int
    trained: int
    dropped: dict[str, int]
    source: dict[str, Any]
    next: int = 0
    evaluated: int | None = None
    attempts: dict[str, int] = {}
    without_signal: int = 0


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag="admitted"):
    """The source served `prompt`, and `group` runs, while the fleet served `version`."""

    group: int
    prompt: Prompt
    version: int


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """What is known of an answer of a running group, to the request whose `asked` this is (`answers.asked`): the arrays
    are `[tokens]`. It is whole, or without a `finish_reason` as much of it as there was at a checkpoint."""

    group: int
    request_id: str
    asked: int
    output_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: FinishReason | None = None
    interruptions: int = 0


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag="judged"):
    """The verdict on a whole answer of a running group."""

    group: int
    request_id: str
    verdict: Verdict


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The group's answers are all there. Written again if they were sampled again."""

    group: int
    trajectories: list[Trajectory]
    admitted_version: int


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """The group is out, for `reason`; with `again` its prompt went back to the source."""

    group: int
    reason: str
    again: bool


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """`groups`, in this order, were the batch of a step that made `version`; `trained` of them were trained, the others
    are ready again."""

    version: int
    groups: list[int]
    trained: list[int]

    @property
    def whole(self) -> bool:
        """Whether all of its batch was trained; the same step made again comes to the same weights then."""
        return len(self.trained) == len(self.groups)


class Evaluated(msgspec.Struct, frozen=True, kw_only=True, tag="evaluated"):
    """The evaluation of `version` has been reported."""

    version: int


Record = State | Admitted | Answer | Judged | Ready | Dropped | Step | Evaluated


class Journal(Protocol):
    """Where the controller writes down what happens, before anything else comes of it."""

    @property
    def next(self) -> int:
        """The number of the next record."""

    def write(self, record: Record) -> None:
        """Returns once the record outlives this process. Never raises: a run does not end for its journal's sake."""


class NoJournal:
    """For controllers whose run is not to be continued: the simulator's."""

    next = 0

    def write(self, record: Record) -> None: ...


def ready(group: Group) -> Ready:
    """The record of a finished group."""
    return Ready(group=group.id, trajectories=group.trajectories, admitted_version=group.admitted_version)


def stepped(batch: Batch, result: StepResult) -> Step:
    """The record of a step that came to `result`."""
    return Step(version=result.version, groups=[group.id for group in batch.groups], trained=result.trained)


def frame(record: Record, number: int) -> bytes:
    """The bytes of one record."""
    payload = encode(record)
    return _HEADER.pack(len(payload), _checksum(number, payload), number) + payload


def unframe(chunks: Iterable[bytes]) -> Generator[tuple[int, Record], None, bool]:
    """Numbers and records of a stream of frames, up to its end or to the first that is cut off or damaged. Returns
    whether that was the end."""
    buffer = bytearray()
    source = iter(chunks)
    while True:
        if not _fill(buffer, _HEADER.size, source):
            return not buffer
        length, checksum, number = _HEADER.unpack_from(buffer)
        if length > MAX_RECORD or not _fill(buffer, _HEADER.size + length, source):
            return False
        payload = bytes(memoryview(buffer)[_HEADER.size : _HEADER.size + length])
        if _checksum(number, payload) != checksum:
            return False
        try:
            record: Record = decode(payload, Record)  # type: ignore[arg-type]
        except msgspec.DecodeError:
            return False
        del buffer[: _HEADER.size + length]
        yield number, record


def whole_frame_behind(data: bytes | mmap.mmap, number: int) -> bool:
    """Whether a whole frame of one of the records soon behind `number` is anywhere in `data`."""
    for later in range(number + 1, number + 1 + _REACH):
        sought = struct.pack("<Q", later)
        at = data.find(sought, _NUMBER_AT)
        while at >= 0:
            length, checksum, _ = _HEADER.unpack_from(data, at - _NUMBER_AT)
            begin = at + len(sought)
            if length <= len(data) - begin and _checksum(later, data[begin : begin + length]) == checksum:
                return True
            at = data.find(sought, at + 1)
    return False


def in_turn(numbered: Iterable[tuple[int, Record]], first: int) -> Iterator[Record]:
    """The records from number `first` on, as long as none is missing; those before are passed over."""
    expected = first
    for number, record in numbered:
        if number < expected:
            continue
        if number > expected:
            return
        expected += 1
        yield record


def _fill(buffer: bytearray, size: int, source: Iterator[bytes]) -> bool:
    while len(buffer) < size:
        chunk = next(source, None)
        if chunk is None:
            return False
        buffer += chunk
    return True


def _checksum(number: int, payload: bytes) -> int:
    return zlib.crc32(payload, number & 0xFFFFFFFF)
