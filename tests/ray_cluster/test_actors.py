"""What an actor does on its node, without a cluster around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from fleuve.launch.ray_actors import MAX_BEHIND, MAX_PIECE, Failed, LogPiece, ProcessActor, Started
from fleuve.launch.ray_process import LogCopy

pytestmark = pytest.mark.ray
HERE = str(Path(__file__).parent)


class Remote:
    """Calls methods as those of an actor are called: `.remote(...)`, to be awaited."""

    def __init__(self, actor: ProcessActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Remote:
        method = getattr(self._actor, name)
        return type("Method", (), {"remote": staticmethod(method)})()


@asynccontextmanager
async def started(monkeypatch, **options: object) -> AsyncIterator[ProcessActor]:
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.chdir(HERE)
    actor = ProcessActor(HERE, {})
    arguments = {"with_socket": False}
    assert isinstance(await actor.start("child", "noisy_child", options, "127.0.0.1", arguments), Started)
    yield actor
    await actor.stop(0)


async def written(actor: ProcessActor, size: int) -> None:
    async with asyncio.timeout(60):
        while (await actor.read_log(size)).content[-8:] != b"written\n":  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_log_comes_whole_and_in_order(tmp_path, monkeypatch):
    size = 3 * MAX_PIECE
    async with started(monkeypatch, bytes=size) as actor:
        await written(actor, size)
        copy = LogCopy(tmp_path / "child.log")
        copy.path.write_bytes(b"of a former life\n")
        await copy.catch_up(Remote(actor))
        assert copy.path.read_bytes() == b"of a former life\n" + b"x" * size + b"\nwritten\n"


async def test_a_log_that_grows_too_fast_is_cut_and_says_so(tmp_path, monkeypatch):
    size = MAX_BEHIND + 3 * MAX_PIECE
    async with started(monkeypatch, bytes=size) as actor:
        await written(actor, size)
        copy = LogCopy(tmp_path / "child.log")
        await copy.catch_up(Remote(actor))
        log = copy.path.read_bytes()
        assert len(log) < 2 * MAX_PIECE
        assert b"bytes were written too fast to be copied]" in log
        assert log.endswith(b"x\nwritten\n")


async def test_the_end_of_a_process_is_told_and_nothing_is_left_of_one_that_is_killed(monkeypatch):
    async with started(monkeypatch, bytes=1, exit=3) as actor:
        assert await actor.wait() == (3, "exit status 3")
    async with started(monkeypatch, bytes=1) as actor:
        (child,) = [p for p in psutil.Process().children() if "noisy_child" in p.cmdline()]
        await actor.kill()
        assert (await actor.wait())[1] == "killed by SIGKILL"
        assert not child.is_running()


async def test_what_does_not_come_up_says_what_became_of_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", HERE)
    actor = ProcessActor(HERE, {})
    failed = await actor.start("child", "noisy_child", {"bytes": 1, "exit": 2}, "127.0.0.1", {})
    assert failed == Failed("died while starting: exit status 2", lost=False)
    assert (await actor.read_log(0)) == LogPiece(0, 10, b"x\nwritten\n")
