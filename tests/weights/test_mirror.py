"""Weights between machines without a common file system: the same path on each, fetched once, checked, cleared away."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from fleuve.types import WeightFile
from fleuve.weights import directory
from fleuve.weights import mirror as mirror_module
from fleuve.weights.mirror import Mirror, MirrorError, serve
from fleuve.wire.guard import bearer

TOKEN = "secret"


def publish(source: Path, there: Path, version: int, content: bytes) -> WeightFile:
    """A file in `source`, as it is called in the mirror's `there`: on two machines the two are one path."""
    name = f"weights-{version:08d}.safetensors"
    source.mkdir(exist_ok=True)
    (source / name).write_bytes(content)
    checksum = f"crc32:{zlib.crc32(content):08x}"
    return WeightFile(version=version, path=str(there / name), bytes=len(content), checksum=checksum)


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        end = await serve(directory, sock, TOKEN)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        await end()


async def test_a_version_is_fetched_once_however_many_want_it(tmp_path):
    content = bytes(range(256)) * 40_000
    source, there = tmp_path / "source", tmp_path / "there"
    file = publish(source, there, 3, content)
    mirror = Mirror(there)
    async with served(source) as url:
        fetched = await asyncio.gather(*(mirror.bring(file, url, TOKEN, 30) for _ in range(4)))
    assert sorted(fetched) == [0, 0, 0, len(content)]
    assert (there / "weights-00000003.safetensors").read_bytes() == content


async def test_what_the_source_has_removed_goes_from_the_mirror_too(tmp_path):
    source, there = tmp_path / "source", tmp_path / "there"
    mirror = Mirror(there)
    async with served(source) as url:
        for version in (1, 2):
            file = publish(source, there, version, b"x" * version)
            await mirror.bring(file, url, TOKEN, 30)
            (source / Path(file.path).name).unlink()
    assert [path.name for path in there.glob("weights*")] == ["weights-00000002.safetensors"]


@pytest.mark.parametrize("sent", [b"abcd", b"abcdxy", b"abcdefgh"], ids=["cut off", "changed", "longer"])
async def test_what_was_not_published_never_has_the_name(tmp_path, sent):
    source, there = tmp_path / "source", tmp_path / "there"
    file = publish(source, there, 1, b"abcdef")
    (source / Path(file.path).name).write_bytes(sent)
    mirror = Mirror(there)
    async with served(source) as url:
        with pytest.raises(MirrorError, match=r"version 1 .*published"):
            await mirror.bring(file, url, TOKEN, 30)
    assert list(there.glob("weights*")) == []


async def test_a_source_that_has_it_no_more_is_one_line(tmp_path):
    source, there = tmp_path / "source", tmp_path / "there"
    file = publish(source, there, 1, b"abcdef")
    (source / Path(file.path).name).unlink()
    async with served(source) as url:
        with pytest.raises(MirrorError, match="not there any more"):
            await Mirror(there).bring(file, url, TOKEN, 30)


async def test_a_source_that_is_silent_is_given_up_in_time(tmp_path):
    file = publish(tmp_path / "source", tmp_path / "there", 1, b"abcdef")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(MirrorError, match=r"not here within 0\.2 s"):
            await Mirror(tmp_path / "there").bring(file, url, TOKEN, 0.2)


async def test_only_weights_are_served_and_only_to_who_knows_the_token(tmp_path):
    source = tmp_path / "source"
    publish(source, source, 1, b"abcdef")
    (source / "owner.lock").touch()
    (source / "weights-00000007.safetensors").symlink_to("/etc/hostname")
    async with served(source) as url, aiohttp.ClientSession(headers=bearer(TOKEN)) as session:
        for name in ("owner.lock", "..%2Fsource%2Fowner.lock", "%2Fetc%2Fhostname"):
            async with session.get(f"{url}/{name}") as response:
                assert response.status in (403, 404), name
        async with session.get(f"{url}/weights-00000007.safetensors") as response:
            assert response.status == 403
        async with aiohttp.ClientSession() as stranger, stranger.get(f"{url}/weights-00000001.safetensors") as response:
            assert response.status == 401


async def test_a_file_elsewhere_is_not_written(tmp_path):
    file = publish(tmp_path / "source", tmp_path / "elsewhere", 1, b"abcdef")
    async with served(tmp_path / "source") as url:
        with pytest.raises(MirrorError, match="no published weights file"):
            await Mirror(tmp_path / "there").bring(file, url, TOKEN, 30)


@pytest.mark.parametrize("when", ["before its file is there", "while it is locked"])
def test_a_mirror_that_is_swept_before_it_is_held_is_made_again(tmp_path, monkeypatch, when):
    """Another run's sweep comes between any two of the maker's steps."""
    claim, there, swept = directory.claim, tmp_path / "fleuve-1-w", []

    def swept_first(path: Path, name: str) -> int:
        if not swept:
            swept.append(path)
            if when == "while it is locked":
                held = claim(path, name)
                threading.Timer(0.1, lambda: (shutil.rmtree(path), os.close(held))).start()
            else:
                assert directory.sweep(tmp_path) == [path]
        return claim(path, name)

    monkeypatch.setattr(mirror_module, "claim", swept_first)
    mirror = Mirror(there)
    assert swept == [there]
    assert there.is_dir()
    assert directory.sweep(tmp_path) == []
    mirror.close()
    assert not there.exists()


def test_a_mirror_on_the_machine_of_the_original_leaves_it_there(tmp_path):
    original, copy = Mirror(tmp_path / "w"), Mirror(tmp_path / "w")
    copy.close()
    assert (tmp_path / "w").is_dir()
    original.close()
    assert not (tmp_path / "w").exists()
