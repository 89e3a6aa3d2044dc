"""All of a run's journal, which the run itself forgets behind its checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fleuve.control.journal import Record, unframe
from fleuve.launch.journal import first_of, segments


class Keeper:
    """Links every segment into a directory of its own, as soon as it is seen."""

    def __init__(self, journal: Path, kept: Path) -> None:
        self._journal = journal
        self._kept = kept
        self._seen: dict[int, tuple[int, Path]] = {}  # by inode: the number of its first record, the link
        kept.mkdir()

    def look(self) -> None:
        """Call it often: a segment is there for as long as a checkpoint takes, at least."""
        for path in segments(self._journal):
            with contextlib.suppress(FileNotFoundError):
                inode = path.stat().st_ino
                if inode not in self._seen:
                    link = self._kept / f"{len(self._seen):04d}-{path.name}"
                    os.link(path, link)
                    self._seen[inode] = first_of(path), link

    def records(self) -> list[Record]:
        """From the first to the last. A run that went back to a record has written what followed it anew.

        Raises:
            ValueError: one is missing.
        """
        written: dict[int, Record] = {}
        for first, path in self._seen.values():
            written = {number: record for number, record in written.items() if number < first}
            written.update(unframe(_chunks(path)))
        if sorted(written) != list(range(len(written))):
            raise ValueError(f"records {sorted(set(range(max(written))) - set(written))} are missing")
        return [written[number] for number in range(len(written))]


def _chunks(path: Path) -> Iterator[bytes]:
    yield path.read_bytes()
