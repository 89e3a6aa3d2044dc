"""The trainer's state on disk, whole (`trainer.safetensors`) or a file for each rank that wrote it.

Tensors, their version, and how they are cut, no pickled objects: opening them executes nothing. A rank's file holds
its part of every tensor (`train.layout`); whoever reads gets the parts that are its own, of however many ranks, and
reads no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleuve.errors import UserError
from fleuve.train.layout import Layout, overlap, within

WHOLE = "trainer.safetensors"
_SHARE = re.compile(r"trainer-(\d{5})-of-(\d{5})\.safetensors")


def share_name(rank: int, count: int) -> str:
    """The file of one of `count` ranks."""
    return f"trainer-{rank + 1:05d}-of-{count:05d}.safetensors"


def share_notes(version: int, layout: Layout) -> dict[str, str]:
    """What a rank's file says beside its tensors; `layout` is that of the ranks that wrote."""
    notes = {"version": str(version)}
    if layout.split:
        notes |= {"tensor": str(layout.tensor), "split": msgspec.json.encode(layout.split).decode()}
    return notes


def state_files(path: Path) -> list[Path]:
    """Those of the checkpoint in `path`, in the order of ranks.

    Raises:
        UserError: there are none, or some are missing.
    """
    if (path / WHOLE).exists():
        return [path / WHOLE]
    found = {int(m[1]): int(m[2]) for file in path.glob("trainer-*") if (m := _SHARE.fullmatch(file.name))}
    if not found:
        raise UserError(f"{path} is no checkpoint: {WHOLE} is missing")
    count = max(found.values())
    missing = [share_name(rank, count) for rank in range(count) if found.get(rank + 1) != count]
    if missing:
        raise UserError(f"{path} is no whole checkpoint: {missing[0]} is missing")
    return [path / share_name(rank, count) for rank in range(count)]


class StateFiles(Mapping[str, Tensor]):
    """What `rank` holds of the state in `path`, by name, where ranks hold it as `layout` says; a context manager.

    Raises:
        UserError: it is none, cannot be read, or its files are not of one another.
    """

    def __init__(self, path: Path, layout: Layout | None = None, rank: int = 0) -> None:
        self._own = layout or Layout()
        self._rank = rank
        self._stack = ExitStack()
        self._files: list[Any] = []
        versions: set[str] = set()
        files = state_files(path)
        for file in files:
            try:
                self._files.append(opened := self._stack.enter_context(safe_open(file, framework="pt", device="cpu")))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} is broken or cut off: {' '.join(str(error).split())}") from error
            notes = opened.metadata() or {}
            version = notes.get("version")
            if version is None:
                raise UserError(f"{file} is no trainer state: it names no version")
            versions.add(version)
        if len(versions) > 1:
            raise UserError(f"{path}: its files are of different versions: {', '.join(sorted(versions))}")
        self._theirs = _layout_of(files[0], self._files[0].metadata() or {}, len(files))
        self._names = list(self._files[0].keys())
        self.version = int(versions.pop())

    def __enter__(self) -> StateFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        shapes = [file.get_slice(name).get_shape() for file in self._files]
        if not shapes[0]:  # a number, the same for all
            return self._files[0].get_tensor(name)  # type: ignore[no-any-return]
        if len(self._files) == self._own.count == 1:
            return self._files[0].get_tensor(name)  # type: ignore[no-any-return]
        parameter = name.partition("/")[2]
        shape = self._theirs.whole(parameter, shapes)
        wanted = self._own.box(parameter, shape, self._rank)
        found = torch.empty([s.stop - s.start for s in wanted], dtype=self._files[0].get_slice(name)[0:0].dtype)
        for rank, file in enumerate(self._files):
            box = self._theirs.box(parameter, shape, rank)
            common = overlap(box, wanted) if self._theirs.counts(parameter, rank) else None
            if common is not None:
                found[within(common, wanted)] = file.get_slice(name)[within(common, box)]
        return found


def _layout_of(file: Path, notes: Mapping[str, str], count: int) -> Layout:
    try:
        split = msgspec.json.decode(notes.get("split", "{}"), type=dict[str, int | None])
        return Layout(count, int(notes.get("tensor", 1)), split)
    except (ValueError, msgspec.DecodeError) as error:
        raise UserError(f"{file} does not say how its tensors are cut: {error}") from error
