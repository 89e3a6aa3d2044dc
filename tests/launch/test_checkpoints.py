"""Whatever cuts the writing of a checkpoint short, at whatever operation and byte: it is whole, or it is none."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleuve.control.journal import Admitted, Record, State
from fleuve.launch.checkpoints import COMMITTED, Checkpoints, checkpoint_at, committed
from fleuve.launch.files import Files
from fleuve.types import Prompt

WEIGHTS = b"w" * 100


class Cut(BaseException):
    """The process is gone."""


class CutFiles(Files):
    """The real file system until operation `at`, of which only `share` is done."""

    def __init__(self, at: int, share: float) -> None:
        self.at, self.share, self.done = at, share, 0

    def _step(self) -> bool:
        """Whether this operation is the one that is cut; none comes after it."""
        if self.done > self.at:
            raise Cut
        self.done += 1
        return self.done == self.at + 1

    def make_directory(self, path: Path) -> None:
        if self._step():
            raise Cut
        super().make_directory(path)

    def write(self, path: Path, parts: list[bytes]) -> None:
        if self._step():
            whole = b"".join(parts)
            path.write_bytes(whole[: int(self.share * len(whole))])
            raise Cut
        super().write(path, parts)

    def sync(self, directory: Path) -> None:
        if self._step():
            raise Cut
        super().sync(directory)

    def rename(self, old: Path, new: Path) -> None:
        if self._step() and self.share < 0.5:
            raise Cut
        super().rename(old, new)
        if self.done == self.at + 1:
            raise Cut

    def remove(self, path: Path) -> None:
        if self._step():
            if path.is_dir():  # some of it is gone
                for file in sorted(p for p in path.rglob("*") if p.is_file()):
                    if random.Random(f"{self.share}{file.name}").random() < self.share:
                        file.unlink()
            raise Cut
        super().remove(path)


class Trainer:
    """Writes its part in several files, as the real one does; may be cut in the middle of it."""

    def __init__(self, files: CutFiles | None = None) -> None:
        self.files = files

    async def save(self, path: Path) -> None:
        files = self.files or Files()
        files.make_directory(path / "model")
        files.write(path / "model" / "model.safetensors", [WEIGHTS])
        files.sync(path / "model")
        files.write(path / "trainer.safetensors", [WEIGHTS, WEIGHTS])
        files.sync(path)


def records(version: int) -> list[Record]:
    state = State(version=version, admitted=3, trained=2, dropped={}, source={"position": version}, next=10 * version)
    prompt = Prompt(id="p", input_ids=[1], text="", answer="")
    return [state, Admitted(group=2, prompt=prompt, version=version)]


def save(directory: Path, version: int, files: CutFiles | None = None, keep: int = 1) -> None:
    asyncio.run(Checkpoints(directory, keep, files).save(version, Trainer(files), records(version)))  # type: ignore[arg-type]


def assert_whole(path: Path, version: int) -> None:
    assert (path / "model" / "model.safetensors").read_bytes() == WEIGHTS
    assert (path / "trainer.safetensors").read_bytes() == WEIGHTS * 2
    checkpoint = checkpoint_at(path)
    assert checkpoint is not None
    assert (checkpoint.state().version, checkpoint.state().next) == (version, 10 * version)
    assert len(list(checkpoint.records())) == 2


def operations(tmp: Path) -> int:
    """How many a checkpoint takes that replaces an earlier one."""
    files = CutFiles(10**9, 0)
    save(tmp, 1)
    save(tmp, 2, files)
    shutil.rmtree(tmp)
    return files.done


@pytest.fixture(scope="module")
def count(tmp_path_factory) -> int:
    return operations(tmp_path_factory.mktemp("count") / "c")


@given(st.data(), st.integers(0, 100))
@settings(max_examples=60)
def test_a_checkpoint_that_is_cut_anywhere_is_never_loaded_and_the_one_before_is_kept(tmp_path_factory, count, data, p):
    directory = tmp_path_factory.mktemp("run")
    save(directory, 1)
    at = data.draw(st.integers(0, count - 1))
    with contextlib.suppress(Cut):
        save(directory, 2, CutFiles(at, p / 100))
    found = committed(directory)
    assert found, "both are gone"
    for checkpoint in found:
        assert_whole(checkpoint.path, checkpoint.version)
    Checkpoints(directory, 1).tidy(reached=2)
    assert {path.name for path in directory.iterdir()} == {checkpoint.path.name for checkpoint in found}
    save(directory, 3)
    assert [c.version for c in committed(directory)] == [3]
    assert sorted(path.name for path in directory.iterdir() if (path / COMMITTED).exists()) == ["step-000003"]


def test_what_was_left_behind_is_in_nobody_s_way(tmp_path_factory, count):
    for at in range(count):
        directory = tmp_path_factory.mktemp("run")
        save(directory, 1)
        with contextlib.suppress(Cut):
            save(directory, 2, CutFiles(at, 0.5))
        save(directory, 3)
        assert [c.version for c in committed(directory)] == [3]


@given(st.integers(0, 1000), st.sampled_from(["model/model.safetensors", "trainer.safetensors", "controller.bin"]))
@settings(max_examples=15)
def test_a_file_that_lost_its_end_makes_it_none(tmp_path_factory, share, name):
    directory = tmp_path_factory.mktemp("run")
    save(directory, 1, keep=2)
    save(directory, 2, keep=2)
    file = directory / "step-000002" / name
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * share // 1001])
    assert [c.version for c in committed(directory)] == [1]


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_half_of_the_new_one(tmp_path):
    class Full(Files):
        def write(self, path: Path, parts: list[bytes]) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    save(tmp_path, 1)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(Checkpoints(tmp_path, 1, Full()).save(2, Trainer(), records(2)))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_the_newest_are_kept(tmp_path):
    for version in range(1, 6):
        save(tmp_path, version, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000005"]


def test_one_that_is_there_is_not_written_again(tmp_path):
    save(tmp_path, 1)
    before = (tmp_path / "step-000001").stat().st_mtime_ns
    save(tmp_path, 1)
    assert (tmp_path / "step-000001").stat().st_mtime_ns == before


@pytest.mark.parametrize("marker", ["", "{", "[]", "{}", '{"version": 1}', '{"version": "x", "files": {}}', "1\n"])
def test_a_marker_that_is_none_marks_nothing(tmp_path, marker):
    save(tmp_path, 1)
    (tmp_path / "step-000001" / COMMITTED).write_text(marker)
    assert committed(tmp_path) == []
    assert (tmp_path / "step-000001" / "controller.bin").exists()
