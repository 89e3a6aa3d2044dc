"""A whole checkpoint as the real trainer writes it, torn at every operation and byte: it is never loaded, and the one
before is. The same where the power fails, and what was not synced is gone, or is there in part."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from disk_of_a_checkpoint import Disk, Kept, Name, Operation, Recorder, Remove, Rename, Sync, Write, tree
from tiny import make_batch, make_trainer, save_tiny_model

from fleuve.control.journal import Admitted, Ready, Record, State
from fleuve.launch.checkpoints import COMMITTED, GROUPS, Checkpoints, committed
from fleuve.train.trainer import Trainer
from fleuve.types import Prompt

SMALL = 4096
"""Bytes of a write that is cut at each of them; of a larger one at its ends and at `SAMPLE` places between."""
SAMPLE = 64
SOME = 8
"""Random choices, at each operation, of what is left when the power fails."""

FIRST, SECOND = "step-000001", "step-000002"


@dataclass(frozen=True)
class Written:
    """The second checkpoint of a run that keeps one: what there was before, what was done, what there is in the end."""

    before: dict[Name, bytes | None]
    operations: list[Operation]
    after: dict[Name, bytes | None]

    @property
    def marked(self) -> int:
        """How many operations there are until it is marked as whole."""
        return self.operations.index(Rename((SECOND, COMMITTED + ".part"), (SECOND, COMMITTED))) + 1

    @property
    def safe(self) -> int:
        """How many until the mark is on the disk."""
        return self.marked + self.operations[self.marked :].index(Sync((SECOND,))) + 1


class Saves:
    """The part of `contracts.Trainer` that checkpoints use, without a process between."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def save(self, path: Path) -> None:
        self._trainer.save(path)


def records(version: int) -> list[Record]:
    prompt = Prompt(id="p", input_ids=[1, 2, 3], text="1+1=", answer="2")
    state = State(version=version, admitted=6, trained=4, dropped={}, source={"position": version}, next=10 * version)
    running = [Admitted(group=group, prompt=prompt, version=version) for group in (4, 5)]
    return [state, *running, Ready(group=4, trajectories=[], admitted_version=version)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Written]:
    scratch = tmp_path_factory.mktemp("scratch")
    trainer = make_trainer(save_tiny_model(scratch / "model"), scratch / "weights")
    directory = scratch / "checkpoints"
    directory.mkdir()

    def save(version: int) -> None:
        trainer.step(make_batch(seed=version, version=version - 1, oldest=version - 1))
        asyncio.run(Checkpoints(directory, 1).save(version, Saves(trainer), records(version)))  # type: ignore[arg-type]

    save(1)
    before = tree(directory)
    recorder = Recorder(directory)
    with recorder.watching():
        save(2)
    return trainer, Written(before, recorder.operations, tree(directory))


@pytest.fixture
def written(made: tuple[Trainer, Written]) -> Written:
    return made[1]


class Directory:
    """A real directory that is made to hold one tree after another."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self._path = path
        self._now: dict[Name, bytes | None] = {}

    def hold(self, wanted: dict[Name, bytes | None]) -> None:
        for name in sorted((n for n in self._now if n not in wanted), reverse=True):
            path = self._path.joinpath(*name)
            path.rmdir() if self._now[name] is None else path.unlink()
        for name, content in sorted(wanted.items()):
            if name not in self._now or self._now[name] != content:
                path = self._path.joinpath(*name)
                path.mkdir() if content is None else path.write_bytes(content)
        self._now = dict(wanted)

    def newest(self) -> int | None:
        """The version that a run would go on from."""
        found = committed(self._path)
        return found[-1].version if found else None


def is_true(held: dict[Name, bytes | None], version: int, written: Written) -> bool:
    """Whether every file of this checkpoint is what was written."""
    source, name = (written.before, FIRST) if version == 1 else (written.after, SECOND)
    return all(held.get(path) == content for path, content in source.items() if path[0] == name)


def cuts(content: bytes, rng: random.Random) -> list[int]:
    """How much of a write there is when it is cut, in bytes."""
    size = len(content)
    if size <= SMALL:
        return list(range(size))
    return sorted({0, 1, SMALL, size - 1, *(rng.randrange(size) for _ in range(SAMPLE))})


def test_the_record_is_of_all_that_was_done(written: Written) -> None:
    disk = Disk(written.before)
    for operation in written.operations:
        disk.do(operation)
    assert disk.killed() == written.after
    names = {path[-1] for op in written.operations if isinstance(op, Write) for path in [op.path]}
    assert {"config.json", "model.safetensors", GROUPS, COMMITTED + ".part"} <= names
    assert {type(operation) for operation in written.operations} >= {Write, Rename, Sync, Remove}


def test_killed_at_any_operation_and_byte_it_is_never_loaded_and_the_one_before_is(
    written: Written, tmp_path: Path
) -> None:
    directory = Directory(tmp_path / "checkpoints")
    rng = random.Random(0)
    disk = Disk(written.before)
    for number, operation in enumerate(written.operations):
        expected = 1 if number < written.marked else 2
        held = disk.killed()
        directory.hold(held)
        assert directory.newest() == expected, f"before operation {number}, {operation}"
        assert is_true(held, expected, written)
        if isinstance(operation, Write):
            file = (tmp_path / "checkpoints").joinpath(*operation.path)
            with file.open("wb", buffering=0) as opened:
                there = 0
                for size in cuts(operation.content, rng):
                    opened.write(operation.content[there:size])
                    there = size
                    assert directory.newest() == expected, f"{operation.path} cut at {size}"
            file.unlink() if operation.path not in held else file.write_bytes(held[operation.path] or b"")
        disk.do(operation)
    directory.hold(disk.killed())
    assert directory.newest() == 2


def untrue(written: Written, operations: list[Operation], tmp_path: Path) -> Iterator[str]:
    """What can be loaded after a power failure that should not, at any of `operations`."""
    directory = Directory(tmp_path / "checkpoints")
    disk = Disk(written.before)
    marked = operations.index(Rename((SECOND, COMMITTED + ".part"), (SECOND, COMMITTED))) + 1
    seen: set[int] = set()
    for number in range(len(operations) + 1):
        extremes = [(n, c) for n in ("all", "none") for c in ("whole", "empty", "zeros")]
        for seed, (names, content) in enumerate([*extremes, *[("some", "some")] * SOME]):
            left = disk.after_power_failure(Kept(names, content, seed=1000 * number + seed))
            key = hash(frozenset(left.items()))
            if key in seen:
                continue
            seen.add(key)
            directory.hold(left)
            version = directory.newest()
            where = f"after {number} operations, names {names}, content {content}"
            if version is None:
                yield f"{where}: none is left"
            elif not is_true(left, version, written):
                yield f"{where}: version {version} is not whole"
            elif version == 2 and number < marked:
                yield f"{where}: version 2 is not made yet"
        if number < len(operations):
            disk.do(operations[number])


def test_when_the_power_fails_at_any_operation_it_is_whole_or_absent_whatever_of_the_rest_is_on_the_disk(
    written: Written, tmp_path: Path
) -> None:
    assert list(untrue(written, written.operations, tmp_path)) == []


def test_once_the_mark_is_on_the_disk_it_is_what_a_run_goes_on_from(written: Written, tmp_path: Path) -> None:
    disk = Disk(written.before)
    directory = Directory(tmp_path / "checkpoints")
    for number, operation in enumerate(written.operations, start=1):
        disk.do(operation)
        if number >= written.safe:
            directory.hold(disk.after_power_failure(Kept("none", "empty", 0)))
            assert directory.newest() == 2


@pytest.mark.parametrize(
    "forgotten",
    [
        ["config.json"],
        ["model.safetensors"],
        ["trainer.safetensors", "trainer.safetensors.part"],
        [GROUPS],
        ["model", "model.part"],
        [""],
        [COMMITTED + ".part"],
    ],
    ids=lambda names: names[0] or "checkpoints",
)
def test_a_sync_that_is_forgotten_would_be_seen(written: Written, tmp_path: Path, forgotten: list[str]) -> None:
    """All are needed but that of the names in the checkpoint: those come once more, with the mark's."""

    def kept(operation: Operation) -> bool:
        return not (isinstance(operation, Sync) and "/".join(operation.path).rpartition("/")[2] in forgotten)

    fewer = list(filter(kept, written.operations))
    assert len(fewer) < len(written.operations)
    assert next(untrue(written, fewer, tmp_path), None) is not None


def test_either_can_be_loaded(made: tuple[Trainer, Written], tmp_path: Path) -> None:
    trainer, written = made
    for version, held in ((1, written.before), (2, written.after)):
        directory = tmp_path / str(version)
        Directory(directory).hold(held)
        (checkpoint,) = committed(directory)
        trainer.load(checkpoint.path)
        assert trainer.version == version
        assert checkpoint.state().next == 10 * version
        assert len(list(checkpoint.records())) == 4
        shutil.rmtree(directory)
