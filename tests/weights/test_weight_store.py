"""Weights arrive whole, of the right version, or not at all."""

import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest
import torch

from fleuve.types import WeightFile
from fleuve.weights import directory as directories
from fleuve.weights.store import WeightError, WeightStore, read_weights


def _tensors(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((3, 5), value)), ("b.c", torch.full((7,), value, dtype=torch.bfloat16))]


@pytest.fixture
def store(tmp_path: Path):
    store = WeightStore(tmp_path / "weights", keep=2)
    yield store
    store.close()


def test_what_is_read_is_what_was_published(store: WeightStore) -> None:
    tensors = read_weights(store.publish(3, _tensors(1.25)))
    assert set(tensors) == {"a", "b.c"}
    assert torch.equal(tensors["a"], torch.full((3, 5), 1.25))
    assert tensors["b.c"].dtype == torch.bfloat16


def test_a_consumer_may_jump_over_versions_and_the_newest_two_stay(store: WeightStore) -> None:
    files = [store.publish(v, _tensors(float(v))) for v in range(4)]
    assert read_weights(files[3])["a"][0, 0] == 3.0
    assert read_weights(files[2])["a"][0, 0] == 2.0
    with pytest.raises(WeightError, match=r"version 1: .* does not exist"):
        read_weights(files[1])
    assert len(list(store.directory.glob("*.safetensors"))) == 2


def test_a_version_that_readers_may_still_be_asked_for_stays(store: WeightStore) -> None:
    files = [store.publish(v, _tensors(float(v)), served=1) for v in range(5)]
    assert [read_weights(f)["a"][0, 0].item() for f in files[1:]] == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(WeightError, match="version 0"):
        read_weights(files[0])
    store.publish(5, _tensors(5.0), served=5)
    assert len(list(store.directory.glob("*.safetensors"))) == 2


def test_publishing_a_version_again_replaces_it(store: WeightStore) -> None:
    store.publish(5, _tensors(1.0))
    store.publish(5, _tensors(2.0))
    file = store.publish(6, _tensors(3.0))
    assert read_weights(file)["a"][0, 0] == 3.0
    assert len(list(store.directory.glob("*.safetensors"))) == 2


def test_reading_goes_on_while_newer_versions_replace_the_file(store: WeightStore) -> None:
    held = read_weights(store.publish(0, _tensors(7.0)))
    for version in range(1, 5):
        store.publish(version, _tensors(float(version)))
    assert torch.equal(held["a"], torch.full((3, 5), 7.0))


def test_a_truncated_file_is_refused_by_its_size(store: WeightStore) -> None:
    file = store.publish(1, _tensors(1.0))
    os.truncate(file.path, file.bytes - 1)
    with pytest.raises(WeightError, match=f"{file.bytes - 1} bytes, published were {file.bytes}"):
        read_weights(file)


def test_a_flipped_bit_is_refused_by_the_checksum(store: WeightStore) -> None:
    file = store.publish(1, _tensors(1.0))
    content = bytearray(Path(file.path).read_bytes())
    content[-1] ^= 1
    Path(file.path).write_bytes(content)
    with pytest.raises(WeightError, match=r"checksum crc32:\w+, published was " + file.checksum):
        read_weights(file)


def test_the_wrong_version_is_refused_though_the_file_is_whole(store: WeightStore) -> None:
    file = store.publish(1, _tensors(1.0))
    with pytest.raises(WeightError, match="are of version 1, expected were those of 2"):
        read_weights(msgspec.structs.replace(file, version=2))


def test_a_file_that_never_existed_is_named() -> None:
    file = WeightFile(version=9, path="/nonexistent/weights", bytes=1, checksum="crc32:00000000")
    with pytest.raises(WeightError, match="/nonexistent/weights does not exist"):
        read_weights(file)


@pytest.mark.parametrize("kind", ["directory", "empty", "pipe", "below a file", "no path", "name too long", "text"])
def test_whatever_is_no_weight_file_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "weights"
    size, checksum = 0, "crc32:00000000"
    if kind == "directory":
        path.mkdir()
        size = path.stat().st_size
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("empty", "below a file"):
        path.touch()
    elif kind == "text":
        path.write_text("no weights")
        size, checksum = 10, f"crc32:{zlib.crc32(b'no weights'):08x}"
    name = {"below a file": f"{path}/x", "no path": "a\0b", "name too long": "x" * 5000}.get(kind, str(path))
    with pytest.raises(WeightError, match="version 1") as caught:
        read_weights(WeightFile(version=1, path=name, bytes=size, checksum=checksum))
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_nothing_behind(store: WeightStore) -> None:
    def broken():
        yield "a", torch.ones(4)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        store.publish(1, broken())
    assert [p.name for p in store.directory.iterdir()] == [directories.LOCK]


def test_close_removes_the_directory(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w", keep=1)
    store.publish(0, _tensors(0.0))
    store.close()
    assert not store.directory.exists()


@pytest.mark.parametrize("writes", ["claim(d);", ""], ids=["claimed by its writer", "no writer yet"])
def test_a_killed_owner_s_directory_is_swept_and_a_living_owner_s_is_not(tmp_path: Path, writes: str) -> None:
    alive = WeightStore(directories.make_directory(str(tmp_path)), keep=1)
    code = (
        "import sys, time; from pathlib import Path; from fleuve.weights.directory import claim, make_directory;"
        f"d = make_directory(sys.argv[1]); {writes} print(d, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    left = Path(owner.stdout.readline().strip())
    assert left.exists()
    assert directories.sweep(tmp_path) == []
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    made = directories.make_directory(str(tmp_path))
    assert not left.exists()
    assert alive.directory.exists()
    assert made.name.startswith(f"fleuve-{os.getpid()}-")
    alive.close()


def test_a_directory_stays_while_its_run_starts_another_writer(tmp_path: Path) -> None:
    made = directories.make_directory(str(tmp_path))
    os.close(directories.claim(made))  # the first one died
    assert directories.sweep(tmp_path) == []
    assert made.exists()


def test_a_directory_that_nobody_ever_held_is_swept_at_once(tmp_path: Path) -> None:
    left = tmp_path / "fleuve-1-left"
    left.mkdir()
    assert directories.sweep(tmp_path) == [left]
    assert not left.exists()


@pytest.mark.parametrize("when", ["before its file is there", "before it is locked", "while it is locked"])
def test_a_directory_that_is_swept_before_its_maker_holds_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another process's sweep comes between any two of the maker's steps."""
    claim, swept = directories.claim, []

    def swept_first(directory: Path, name: str = directories.LOCK) -> int:
        if swept or name != directories.MAKER:
            return claim(directory, name)
        if when == "before it is locked":
            (directory / name).touch()
        swept.append(directory)
        other = (
            "import sys; from pathlib import Path; from fleuve.weights.directory import sweep; sweep(Path(sys.argv[1]))"
        )
        subprocess.run([sys.executable, "-c", other, str(tmp_path)], check=True)
        if when == "while it is locked":
            raise BlockingIOError
        return claim(directory, name)

    monkeypatch.setattr(directories, "claim", swept_first)
    made = directories.make_directory(str(tmp_path))
    assert swept == [path for path in swept if not path.exists()]
    assert made not in swept
    assert list(tmp_path.iterdir()) == [made]
    assert directories.sweep(tmp_path) == []


def test_makers_and_sweepers_at_once_leave_every_maker_its_directory(tmp_path: Path) -> None:
    code = (
        "import sys, time; from fleuve.weights.directory import make_directory\n"
        "made = [make_directory(sys.argv[1]) for _ in range(40)]\n"
        "print(sum(d.exists() and (d / 'maker.lock').exists() for d in made)); sys.stdout.flush(); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    makers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = [maker.stdout.readline() for maker in makers]  # type: ignore[union-attr]
    assert counts == ["40\n"] * 3
    assert len(list(tmp_path.iterdir())) == 120
    assert directories.sweep(tmp_path) == []
    for maker in makers:
        maker.communicate()
    assert len(directories.sweep(tmp_path)) == 120


def test_foreign_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "somebody-else").mkdir()
    (tmp_path / "fleuve-notes").mkdir()
    assert directories.sweep(tmp_path) == []
