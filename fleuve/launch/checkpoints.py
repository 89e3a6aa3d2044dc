"""A run's checkpoints: whole or not there.

A checkpoint is made in a directory beside (`step-000100.part`), flushed to the disk, renamed, and marked with
`COMMITTED` last, which lists its files and their sizes. A directory without that marker, or one whose files are not
what the marker says, is no checkpoint. The newest `keep` are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fleuve.contracts import Trainer
from fleuve.control.journal import Record, State, frame, in_turn, unframe
from fleuve.errors import UserError
from fleuve.launch.background import in_background
from fleuve.launch.files import Files

COMMITTED = "COMMITTED"
GROUPS = "controller.bin"
PART = ".part"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole."""

    path: Path
    version: int

    def records(self) -> Iterator[Record]:
        """The controller's state, then the groups that were alive."""
        with (self.path / GROUPS).open("rb") as file:
            yield from in_turn(unframe(iter(lambda: file.read(1 << 20), b"")), 0)

    def state(self) -> State:
        """The ledger and the data cursor.

        Raises:
            UserError: it cannot be read.
        """
        state = next(self.records(), None)
        if not isinstance(state, State):
            raise UserError(f"{self.path / GROUPS} cannot be read: start anew with --resume no")
        return state


class Checkpoints:
    """The `checkpoints/` directory of a run."""

    def __init__(self, directory: Path, keep: int, files: Files | None = None) -> None:
        self._directory = directory
        self._keep = keep
        self._files = files or Files()

    async def save(self, version: int, trainer: Trainer, records: list[Record]) -> Path:
        """Write `step-VERSION` whole, then drop the oldest; the one already there for this version is kept. `records`
        are `Controller.snapshot`'s.

        Raises:
            OSError: the disk is full or not writable. Earlier checkpoints are untouched.
            TrainerError: the trainer could not write its part. The same holds.
        """
        path = self._directory / f"step-{version:06d}"
        if checkpoint_at(path) is not None:
            return path
        part = path.with_name(path.name + PART)
        self._files.remove(part)
        self._files.make_directory(part)
        try:
            await trainer.save(part)
            await in_background(lambda: self._finish(part, path, version, records))
        except BaseException:
            self._files.remove(part)
            raise
        return path

    def tidy(self) -> None:
        """Remove what a process that was killed has left half-made. For who holds the run directory, before `save`."""
        for path in self._directory.iterdir():
            unmarked = _NAME.fullmatch(path.name) and not (path / COMMITTED).exists()
            if unmarked or path.name.endswith(PART):
                self._files.remove(path)

    def oldest_record(self) -> int:
        """The number of the journal's first record that any of the kept checkpoints needs; 0 if there is none."""
        return min((c.state().next for c in committed(self._directory)), default=0)

    def _finish(self, part: Path, path: Path, version: int, records: list[Record]) -> None:
        files = self._files
        files.write(part / GROUPS, [frame(record, number) for number, record in enumerate(records)])
        files.sync(part)
        sizes = {str(f.relative_to(part)): f.stat().st_size for f in sorted(part.rglob("*")) if f.is_file()}
        files.remove(path)  # one that is not whole
        files.rename(part, path)
        files.sync(path.parent)
        marker = path / (COMMITTED + PART)
        files.write(marker, [json.dumps({"version": version, "files": sizes}, indent=1).encode()])
        files.rename(marker, path / COMMITTED)
        files.sync(path)
        for old in committed(self._directory)[: -self._keep]:
            files.remove(old.path / COMMITTED)
            files.sync(old.path)
            files.remove(old.path)


def committed(directory: Path) -> list[Checkpoint]:
    """The whole checkpoints in `directory`, oldest first."""
    found = [checkpoint_at(path) for path in directory.glob("step-*")]
    return sorted((c for c in found if c is not None), key=lambda c: c.version)


def checkpoint_at(path: Path) -> Checkpoint | None:
    """The checkpoint in `path`, if there is one, and it is whole."""
    if not _NAME.fullmatch(path.name):
        return None
    try:
        marker = json.loads((path / COMMITTED).read_bytes())
        whole = all((path / name).stat().st_size == size for name, size in marker["files"].items())
        return Checkpoint(path, int(marker["version"])) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
