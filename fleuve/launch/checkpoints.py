"""A run's checkpoints: whole or not there.

A checkpoint is made in a directory beside (`step-000100.part`), flushed to the disk, renamed, and marked with
`COMMITTED` last, which lists its files with their sizes and checksums. A directory without that marker, or one whose
files are not what the marker says, is no checkpoint. The newest `keep` are kept.

Sizes are looked at whenever checkpoints are; checksums, which take as long as reading the files, before a run goes on
from one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleuve.contracts import Trainer
from fleuve.control.journal import Record, State, frame, in_turn, unframe
from fleuve.errors import UserError
from fleuve.launch.background import in_background
from fleuve.launch.checksums import checksums
from fleuve.launch.files import Files

COMMITTED = "COMMITTED"
GROUPS = "controller.bin"
PART = ".part"
_NAME = re.compile(r"step-(\d{6,})")


class Content(msgspec.Struct, frozen=True):
    """What a file of a checkpoint has to be."""

    bytes: int
    crc32: str


class Marker(msgspec.Struct, frozen=True):
    """`COMMITTED`. The names of files are relative to it."""

    version: int
    files: dict[str, Content]


class Checkpoint(msgspec.Struct, frozen=True):
    """One that is whole, as far as its marker and the sizes of its files tell."""

    path: Path
    version: int
    files: dict[str, Content]

    def damage(self) -> str:
        """Reads all of it: what is not as it was written, in words; empty if nothing is."""
        names = list(self.files)
        try:
            found = checksums([self.path / name for name in names])
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror}"
        damaged = [name for name, crc32 in zip(names, found, strict=True) if crc32 != self.files[name].crc32]
        return f"{', '.join(damaged)}: not what was written there" if damaged else ""

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
            raise UserError(f"{self.path / GROUPS} is damaged: it holds no state")
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

    def tidy(self, reached: int) -> None:
        """Remove what a process that was killed has left half-made: parts, and directories without a marker of versions
        up to `reached`, which the run has come to without them. For who holds the run directory, before `save`."""
        for path in self._directory.iterdir():
            half = version_of(path) in range(reached + 1) and not (path / COMMITTED).exists()
            if half or path.name.endswith(PART):
                self._files.remove(path)

    def oldest_record(self) -> int:
        """The number of the journal's first record that any of the kept checkpoints needs; 0 if there is none."""
        return min((state.next for c in committed(self._directory) if (state := _state_or_none(c))), default=0)

    def _finish(self, part: Path, path: Path, version: int, records: list[Record]) -> None:
        files = self._files
        files.write(part / GROUPS, [frame(record, number) for number, record in enumerate(records)])
        files.sync(part)
        marker = _mark(part, version)
        files.remove(path)  # one that is not whole
        files.rename(part, path)
        files.sync(path.parent)
        part_marker = path / (COMMITTED + PART)
        files.write(part_marker, [msgspec.json.format(msgspec.json.encode(marker), indent=1)])
        files.rename(part_marker, path / COMMITTED)
        files.sync(path)
        for old in committed(self._directory)[: -self._keep]:
            files.remove(old.path / COMMITTED)
            files.sync(old.path)
            files.remove(old.path)


def committed(directory: Path) -> list[Checkpoint]:
    """The whole checkpoints in `directory`, oldest first."""
    found = [checkpoint_at(path) for path in directory.glob("step-*")]
    return sorted((c for c in found if c is not None), key=lambda c: c.version)


def candidates(directory: Path) -> list[Path]:
    """What is called like a checkpoint in `directory`, oldest first."""
    return sorted((p for p in directory.glob("step-*") if version_of(p) is not None), key=lambda p: version_of(p) or 0)


def checkpoint_at(path: Path) -> Checkpoint | None:
    """The checkpoint in `path`, if there is one, and it is whole."""
    found = look(path)
    return found if isinstance(found, Checkpoint) else None


def look(path: Path) -> Checkpoint | str:
    """The checkpoint in `path`; or why it is none, in words."""
    version = version_of(path)
    if version is None:
        return "not called like a checkpoint"
    try:
        marker = msgspec.json.decode((path / COMMITTED).read_bytes(), type=Marker)
        sizes = {name: (path / name).stat().st_size for name in marker.files}
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(path)} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return f"{COMMITTED} is damaged"
    if marker.version != version:
        return f"{COMMITTED} is damaged, or another checkpoint's"
    for name, content in marker.files.items():
        if sizes[name] != content.bytes:
            return f"{name} has {sizes[name]} of {content.bytes} bytes"
    return Checkpoint(path, version, marker.files)


def version_of(path: Path) -> int | None:
    """That of a checkpoint of this name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _mark(directory: Path, version: int) -> Marker:
    files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
    contents = [
        Content(bytes=file.stat().st_size, crc32=crc32) for file, crc32 in zip(files, checksums(files), strict=True)
    ]
    return Marker(version, {str(f.relative_to(directory)): c for f, c in zip(files, contents, strict=True)})


def _state_or_none(checkpoint: Checkpoint) -> State | None:
    try:
        return checkpoint.state()
    except (UserError, OSError):
        return None  # nothing can begin from it
