"""The trainer's state on disk, whole (`trainer.safetensors`) or a file for each rank that wrote it.

Tensors and three numbers, no pickled objects: opening them executes nothing. A rank's file holds its rows of every
tensor; whoever reads gets the rows that are its own, of however many ranks, and reads no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleuve.errors import UserError
from fleuve.train.ranks import rows_of

WHOLE = "trainer.safetensors"
_SHARE = re.compile(r"trainer-(\d{5})-of-(\d{5})\.safetensors")


def share_name(rank: int, count: int) -> str:
    """The file of one of `count` ranks."""
    return f"trainer-{rank + 1:05d}-of-{count:05d}.safetensors"


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
    """What `rank` of `count` holds of the state in `path`, by name; a context manager.

    Raises:
        UserError: it is none, cannot be read, or its files are not of one another.
    """

    def __init__(self, path: Path, rank: int = 0, count: int = 1) -> None:
        self.rank = rank
        self.count = count
        self._stack = ExitStack()
        self._files: list[Any] = []
        versions: set[str] = set()
        files = state_files(path)
        for file in files:
            try:
                self._files.append(opened := self._stack.enter_context(safe_open(file, framework="pt", device="cpu")))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} is broken or cut off: {' '.join(str(error).split())}") from error
            version = (opened.metadata() or {}).get("version")
            if version is None:
                raise UserError(f"{file} is no trainer state: it names no version")
            versions.add(version)
        if len(versions) > 1:
            raise UserError(f"{path}: its files are of different versions: {', '.join(sorted(versions))}")
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
        if len(self._files) == self.count == 1:
            return self._files[0].get_tensor(name)  # type: ignore[no-any-return]
        wanted = rows_of(sum(shape[0] for shape in shapes), self.rank, self.count)
        parts, first = [], 0
        for file, (rows, *_) in zip(self._files, shapes, strict=True):
            begin, end = max(wanted.start, first) - first, min(wanted.stop, first + rows) - first
            if begin < end:
                parts.append(file.get_slice(name)[begin:end])
            first += rows
        return torch.cat(parts) if parts else self._files[0].get_slice(name)[0:0]
