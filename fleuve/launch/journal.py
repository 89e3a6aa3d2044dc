"""The journal of a run on disk, in segments, one from each checkpoint on: `journal/000000001234.bin` begins with record
1234.

Every record is handed to the operating system before `write` returns: a process that is killed loses nothing. It
reaches the disk when the system writes it there: what a power failure takes is a tail, and a shorter tail is a run a
little younger.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from fleuve.control.journal import Record, frame, unframe, whole_frame_behind

_CHUNK = 1 << 20


class JournalFile:
    """Implements `control.journal.Journal`. `next` is the number of the next record.

    When the disk is full it falls silent, having said so, until the next segment begins: records are missing then, and
    a reader stops before them. A checkpoint made after that makes them dispensable.
    """

    def __init__(self, directory: Path, next_record: int, note: Callable[[str], None]) -> None:
        """Goes on with record `next_record`; what is there from that number on is no part of this run's past, and
        nothing that is worth keeping (`settle.settle`)."""
        self.next = next_record
        self._directory = directory
        self._note = note
        self._file: int | None = None
        directory.mkdir(parents=True, exist_ok=True)
        for path in segments(directory):
            if first_of(path) >= next_record:
                path.unlink()
        self.begin_segment()

    @property
    def silent(self) -> bool:
        """Whether records are missing."""
        return self._file is None

    def write(self, record: Record) -> None:
        number, self.next = self.next, self.next + 1
        if self._file is None:
            return
        data = frame(record, number)
        try:
            written = 0
            while written < len(data):  # a disk that is nearly full takes a part
                written += os.write(self._file, data[written:])
        except OSError as error:
            self._fall_silent(error)

    def begin_segment(self) -> None:
        """What follows goes into a new file; call it at the moment of a checkpoint's snapshot."""
        self._close()
        path = segment_from(self._directory, self.next)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._fall_silent(error)

    def forget_before(self, record: int) -> None:
        """Remove the segments all of whose records have smaller numbers."""
        for path, following in itertools.pairwise(segments(self._directory)):
            if first_of(following) <= record:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Flush to the disk."""
        if self._file is not None:
            os.fsync(self._file)
        self._close()

    def _fall_silent(self, error: OSError) -> None:
        self._close()
        self._note(
            f"the journal cannot be written: {error.strerror}; until the next checkpoint, what is made "
            "is lost if this process dies"
        )

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def segments(directory: Path) -> list[Path]:
    """In the order in which they were written."""
    return sorted((p for p in directory.glob("*.bin") if p.stem.isdecimal()), key=first_of)


def segment_from(directory: Path, record: int) -> Path:
    """The segment that begins with a record of this number, if there is one."""
    return directory / f"{record:012d}.bin"


def first_of(segment: Path) -> int:
    """The number of a segment's first record."""
    return int(segment.stem)


class JournalReader:
    """The records from number `first` on, in order, as far as they can be trusted; go through them once. A segment ends
    where the next begins, whatever follows in it: a run that went back to that record wrote the next.

    `next` is the number of the record that comes after what was read so far. At the end, `broken` is the segment that
    lost it, if there are whole records behind it: no process that was killed leaves that.
    """

    def __init__(self, directory: Path, first: int) -> None:
        self.next = first
        self.broken: Path | None = None
        self._directory = directory
        self._whole = True

    def __iter__(self) -> Iterator[Record]:
        paths = segments(self._directory)
        for path, following in itertools.zip_longest(paths, paths[1:]):
            end = math.inf if following is None else first_of(following)
            if end <= self.next:
                continue  # all of it comes before
            later = following is not None
            for number, record in self._frames(path):
                if number >= end or number > self.next:
                    later = True
                    break
                if number == self.next:
                    self.next += 1
                    yield record
            if self.next < end:
                if later or self._has_more(path):
                    self.broken = path
                return

    def _frames(self, path: Path) -> Generator[tuple[int, Record], None, None]:
        self._whole = False  # not at its end
        self._whole = yield from unframe(_chunks(path))

    def _has_more(self, path: Path) -> bool:
        """Whether the segment goes on behind the record that is missing."""
        if self._whole or not path.stat().st_size:
            return False
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return whole_frame_behind(data, self.next)


def read_journal(directory: Path, first: int) -> Iterator[Record]:
    """The records from number `first` on, as far as they can be trusted: see `JournalReader`."""
    return iter(JournalReader(directory, first))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
