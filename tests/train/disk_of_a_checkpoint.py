"""What a program does to a directory, operation by operation; and what a crash after any of them leaves of it.

`Recorder` watches a program write. What it writes through Python is seen as it happens; what a library writes on its
own (safetensors') is found by looking at the tree before each operation that is seen.

`Disk` plays the operations again. Of a process that is killed every operation so far holds. When the power fails, only
what was synced does: of a file its content, of a directory its names. Of the rest any part may be there, or not.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Name = tuple[str, ...]
"""A path below the directory that is watched."""

_EVENTS = ("open", "os.mkdir", "os.remove", "os.rmdir")
"""Of Python's audit hooks: they come before what they tell of."""


@dataclass(frozen=True)
class Make:
    """A directory."""

    path: Name


@dataclass(frozen=True)
class Write:
    """A new file, or other content of one that is there."""

    path: Name
    content: bytes


@dataclass(frozen=True)
class Rename:
    old: Name
    new: Name


@dataclass(frozen=True)
class Remove:
    """A file, or an empty directory."""

    path: Name


@dataclass(frozen=True)
class Sync:
    path: Name


Operation = Make | Write | Rename | Remove | Sync


class Recorder:
    """The operations on what lies below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self._known: dict[Name, bytes | None] = {}
        self._looking = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what happens meanwhile; what is there already is known."""
        self._look()
        self.operations.clear()
        real = {name: getattr(os, name) for name in ("fsync", "replace", "rename")}

        def fsync(descriptor: int) -> None:
            self._look()
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_relative_to(self.root):
                self.operations.append(Sync(path.relative_to(self.root).parts))
            real["fsync"](descriptor)

        def renamed(old: Any, new: Any) -> None:
            self._look()
            if Path(old).is_relative_to(self.root):
                names = Path(old).relative_to(self.root).parts, Path(new).relative_to(self.root).parts
                self.operations.append(Rename(*names))
                self._rename(*names)
            real["replace"](old, new)

        listening = True
        sys.addaudithook(lambda event, _: self._look() if listening and event in _EVENTS else None)
        os.fsync, os.replace, os.rename = fsync, renamed, renamed  # type: ignore[assignment]
        try:
            yield
            self._look()
        finally:
            listening = False
            for name, function in real.items():
                setattr(os, name, function)

    def _look(self) -> None:
        """What has happened since the last look, in the order of its names: that of a write and its directory."""
        if self._looking:
            return
        self._looking = True
        try:
            found = tree(self.root)
            for path in sorted(set(self._known) - set(found), reverse=True):
                self.operations.append(Remove(path))
            for path, content in sorted(found.items()):
                if content is None and path not in self._known:
                    self.operations.append(Make(path))
                elif content is not None and self._known.get(path) != content:
                    self.operations.append(Write(path, content))
            self._known = found
        finally:
            self._looking = False

    def _rename(self, old: Name, new: Name) -> None:
        moved = {path: content for path, content in self._known.items() if path[: len(old)] == old}
        self._known = {path: content for path, content in self._known.items() if path not in moved}
        self._known |= {new + path[len(old) :]: content for path, content in moved.items()}


def tree(root: Path) -> dict[Name, bytes | None]:
    """Files with their content and directories (None) below `root`."""
    return {
        path.relative_to(root).parts: None if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))
    }


@dataclass(eq=False)
class _File:
    content: bytes
    durable: bytes | None = None


@dataclass(eq=False)
class _Directory:
    names: dict[str, _File | _Directory] = field(default_factory=dict)
    durable: dict[str, _File | _Directory] = field(default_factory=dict)
    pending: list[dict[str, _File | _Directory | None]] = field(default_factory=list)
    """Changes since the last sync, in order; None: the name goes."""

    def change(self, changes: dict[str, _File | _Directory | None]) -> None:
        self.pending.append(changes)
        _apply(self.names, changes)


class Disk:
    """A directory of which all that is in `start` is on the disk."""

    def __init__(self, start: dict[Name, bytes | None]) -> None:
        self._root = _Directory()
        for path, content in sorted(start.items()):
            self.do(Make(path) if content is None else Write(path, content))
        self._settle(self._root)

    def do(self, operation: Operation) -> None:
        """One operation."""
        match operation:
            case Make(path):
                self._directory(path[:-1]).change({path[-1]: _Directory()})
            case Write(path, content):
                parent = self._directory(path[:-1])
                there = parent.names.get(path[-1])
                if isinstance(there, _File):
                    there.content = content
                else:
                    parent.change({path[-1]: _File(content)})
            case Remove(path):
                self._directory(path[:-1]).change({path[-1]: None})
            case Rename(old, new):
                if old[:-1] != new[:-1]:
                    raise NotImplementedError("between directories")
                parent = self._directory(old[:-1])
                parent.change({new[-1]: parent.names[old[-1]], old[-1]: None})
            case Sync(path):
                found = self._find(path)
                if isinstance(found, _File):
                    found.durable = found.content
                else:
                    found.durable = dict(found.names)
                    found.pending.clear()

    def killed(self) -> dict[Name, bytes | None]:
        """What there is."""
        return dict(_contents(self._root, lambda d: d.names, lambda f: f.content))

    def after_power_failure(self, kept: Kept) -> dict[Name, bytes | None]:
        """What there may be."""

        def names(directory: _Directory) -> dict[str, _File | _Directory]:
            left = dict(directory.durable)
            for changes in directory.pending:
                if kept.name():
                    _apply(left, changes)
            return left

        return dict(_contents(self._root, names, lambda f: kept.content(f.content, f.durable)))

    def _find(self, path: Name) -> _File | _Directory:
        found: _File | _Directory = self._root
        for name in path:
            assert isinstance(found, _Directory)
            found = found.names[name]
        return found

    def _directory(self, path: Name) -> _Directory:
        found = self._find(path)
        assert isinstance(found, _Directory)
        return found

    def _settle(self, directory: _Directory) -> None:
        directory.durable = dict(directory.names)
        directory.pending.clear()
        for below in directory.names.values():
            if isinstance(below, _Directory):
                self._settle(below)
            else:
                below.durable = below.content


class Kept:
    """What is left of what was not synced. Names: `all` of them, `none`, or `some`; content: `whole`, `empty`, `zeros`
    (the length is there and the bytes are not), or `some` of these."""

    def __init__(self, names: str, content: str, seed: int) -> None:
        self._names, self._content = names, content
        self._rng = random.Random(seed)

    def name(self) -> bool:
        return self._rng.random() < 0.5 if self._names == "some" else self._names == "all"

    def content(self, written: bytes, durable: bytes | None) -> bytes:
        if durable == written:
            return written
        kind = self._content
        if kind == "some":
            kind = self._rng.choice(["whole", "empty", "zeros", "cut", "earlier"])
        match kind:
            case "whole":
                return written
            case "zeros":
                return bytes(len(written))
            case "cut":
                return written[: self._rng.randrange(len(written) + 1)]
            case "earlier":
                return durable or b""
            case _:
                return b""


def _apply(names: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, what in changes.items():
        if what is None:
            names.pop(name, None)
        else:
            names[name] = what


def _contents(directory: _Directory, names: Any, content: Any, at: Name = ()) -> Iterator[tuple[Name, bytes | None]]:
    for name, below in names(directory).items():
        path = (*at, name)
        if isinstance(below, _File):
            yield path, content(below)
        else:
            yield path, None
            yield from _contents(below, names, content, path)
