"""Child processes: they come up with their socket, say why they died, and never outlive their parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from fleuve.launch.process import ChildError, ChildProcess, describe_status
from fleuve.launch.starting import twice

HERE = str(Path(__file__).parent)
ENV = {"PYTHONPATH": HERE}


@asynccontextmanager
async def child(tmp_path: Path, options: dict, **arguments: object) -> AsyncIterator[ChildProcess]:
    process = await ChildProcess.start("worker-0", "launch_children", options, tmp_path / "c.log", env=ENV, **arguments)
    try:
        yield process
    finally:
        await process.stop(grace=0)


async def get(url: str) -> dict:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session, session.get(url) as response:
        return await response.json()


async def test_a_started_child_answers_on_its_url(tmp_path: Path) -> None:
    async with child(tmp_path, {"role": "serve"}, start_timeout=60) as process:
        assert (await get(f"{process.url}/health"))["pid"] == process.pid
        assert process.alive


async def test_a_slow_start_is_waited_for(tmp_path: Path) -> None:
    async with child(tmp_path, {"role": "serve", "delay": 1.5}, start_timeout=60) as process:
        assert (await get(f"{process.url}/health"))["pid"] == process.pid


async def test_a_start_that_takes_too_long_is_an_error_and_leaves_no_process(tmp_path: Path) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with pytest.raises(ChildError, match=r"worker-0 did not answer GET /health within 0\.5 s"):
        async with child(tmp_path, {"role": "serve", "delay": 60}, start_timeout=0.5):
            pass
    assert {p.pid for p in psutil.Process().children(recursive=True)} == before


async def test_a_child_that_dies_at_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ChildError, match=r"(?s)worker-0 died while starting: exit status 3.*c.log.*no weights here"):
        async with child(tmp_path, {"role": "die"}, start_timeout=60):
            pass
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_child_that_is_lost_at_start_is_started_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("fleuve.launch.process._STOPPED_LOOKS", 2)
    notes: list[str] = []
    options = {"role": "lost", "marker": str(tmp_path / "marker"), "signal": number}

    async def start() -> ChildProcess:
        return await ChildProcess.start("worker-0", "launch_children", options, tmp_path / "c.log", env=ENV)

    process = await twice(start, notes.append)
    try:
        assert (await get(f"{process.url}/health"))["pid"] == process.pid
    finally:
        await process.stop(grace=0)
    (note,) = notes
    assert note.startswith(
        "worker-0 died while starting: killed by SIGKILL" if number == signal.SIGKILL else "worker-0 is stop"
    )


async def test_a_child_that_is_lost_twice_or_ends_by_itself_is_not_started_again(tmp_path: Path) -> None:
    starts: list[str] = []

    async def start(role: str) -> ChildProcess:
        starts.append(role)
        return await ChildProcess.start("w", "launch_children", {"role": role}, tmp_path / "c.log", env=ENV)

    with pytest.raises(ChildError, match="exit status 3"):
        await twice(lambda: start("die"), print)
    assert starts == ["die"]
    with pytest.raises(ChildError, match="killed by SIGKILL"):
        await twice(lambda: start("killed"), print)
    assert starts == ["die", "killed", "killed"]


async def test_a_child_that_is_stopped_for_a_moment_comes_up(tmp_path: Path) -> None:
    starting = asyncio.create_task(
        ChildProcess.start("w", "launch_children", {"role": "serve", "delay": 0.2}, tmp_path / "c.log", env=ENV)
    )
    child_pid = await one_child()
    os.kill(child_pid, signal.SIGSTOP)
    await asyncio.sleep(1.5)
    os.kill(child_pid, signal.SIGCONT)
    process = await starting
    assert process.pid == child_pid
    await process.stop(grace=0)


async def one_child() -> int:
    """The process id of the child that this process is about to have."""
    before = {p.pid for p in psutil.Process().children()}
    for _ in range(1000):
        if new := {p.pid for p in psutil.Process().children()} - before:
            return new.pop()
        await asyncio.sleep(0.01)
    raise AssertionError("no child is started")


async def test_the_death_of_a_running_child_is_noticed_and_its_port_refuses(tmp_path: Path) -> None:
    async with child(tmp_path, {"role": "serve"}, start_timeout=60) as process:
        died = asyncio.create_task(process.died())
        os.kill(process.pid, signal.SIGKILL)
        error = await asyncio.wait_for(died, 10)
        assert f"worker-0 (pid {process.pid}) died: killed by SIGKILL" in str(error)
        with pytest.raises(aiohttp.ClientConnectorError):
            await get(f"{process.url}/health")


async def test_a_child_that_was_stopped_is_not_reported_as_died(tmp_path: Path) -> None:
    async with child(tmp_path, {"role": "serve"}, start_timeout=60) as process:
        died = asyncio.create_task(process.died())
        await process.stop(grace=10)
        done, _ = await asyncio.wait({died}, timeout=0.3)
        assert not done
        assert not process.alive
        died.cancel()


async def test_a_child_that_ignores_sigterm_is_killed_when_its_grace_is_over(tmp_path: Path) -> None:
    async with child(tmp_path, {"role": "serve", "stubborn": True}, start_timeout=60) as process:
        assert await process.stop(grace=0.3) == -signal.SIGKILL


async def test_a_child_gets_its_threads_and_its_cores(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    async with child(tmp_path, {"role": "serve"}, cpus={core}, threads=3, start_timeout=60) as process:
        assert (await get(f"{process.url}/health"))["cpus"] == [core]
        environment = await get(f"{process.url}/environment")
        assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"


async def test_ctrl_c_in_the_terminal_does_not_reach_children(tmp_path: Path) -> None:
    async with child(tmp_path, {"role": "serve", "stubborn": True}, start_timeout=60) as process:
        assert os.getsid(process.pid) != os.getsid(0)
        os.kill(process.pid, signal.SIGINT)
        assert (await get(f"{process.url}/health"))["pid"] == process.pid


async def test_twenty_servers_at_once_each_get_their_own_port(tmp_path: Path) -> None:
    """Pitfall 26: every port is held from before its process exists."""

    async def start(i: int) -> ChildProcess:
        log = tmp_path / f"{i}.log"
        return await ChildProcess.start(f"s{i}", "launch_children", {"role": "serve"}, log, env=ENV, start_timeout=120)

    started = await asyncio.gather(*(start(i) for i in range(20)), return_exceptions=True)
    servers = [s for s in started if isinstance(s, ChildProcess)]
    try:
        assert [s for s in started if not isinstance(s, ChildProcess)] == []
        answers = await asyncio.gather(*(get(f"{s.url}/health") for s in servers))
        assert [a["pid"] for a in answers] == [s.pid for s in servers]
        assert len({s.url for s in servers}) == 20
    finally:
        for server in servers:
            await server.stop(grace=0)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_children_and_grandchildren_end_with_their_parent(tmp_path: Path, end: signal.Signals) -> None:
    """Pitfall 25. One grandchild is stuck in a C call that holds the interpreter lock; one child has a clean-up."""
    end_family(tmp_path, end)


def test_children_that_are_stopped_end_with_their_parent_and_clean_up_all_the_same(tmp_path: Path) -> None:
    end_family(tmp_path, signal.SIGKILL, stopped=["with-clean-up", "without"])


def end_family(tmp_path: Path, end: signal.Signals, stopped: Sequence[str] = ()) -> None:
    options = json.dumps({"role": "family", "directory": str(tmp_path)})
    parent = subprocess.Popen([sys.executable, "-m", "launch_children", options], env=os.environ | ENV, cwd=tmp_path)
    names = ["with-clean-up", "with-clean-up.leaf", "without", "without.leaf"]
    try:
        wait_until(lambda: all((tmp_path / f"{name}.pid").exists() for name in names), 60)
        for name in stopped:
            os.kill(int((tmp_path / f"{name}.pid").read_text()), signal.SIGSTOP)
    finally:
        parent.send_signal(end)
        parent.wait(20)
    pids = [int((tmp_path / f"{name}.pid").read_text()) for name in names]
    try:
        wait_until(lambda: not any(running(pid) for pid in pids), 10)
    finally:
        for pid in filter(running, pids):
            os.kill(pid, signal.SIGKILL)
    assert (tmp_path / "cleaned-up").exists()


def wait_until(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_exit_statuses_are_put_into_words() -> None:
    assert describe_status(3) == "exit status 3"
    assert describe_status(-9) == "killed by SIGKILL"
