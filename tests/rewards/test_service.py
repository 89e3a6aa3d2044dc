"""A reward service and its client, over loopback."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from fleuve.config.settings import RewardSettings
from fleuve.errors import UserError
from fleuve.rewards.client import RemoteRewarder
from fleuve.rewards.open import open_rewarder
from fleuve.rewards.pool import RewardPool
from fleuve.rewards.server import application
from fleuve.types import Prompt

HERE = Path(__file__).parent
OBEY = "verifiers_for_tests:obey"


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def prompt(verifier: str = OBEY) -> Prompt:
    return Prompt(id="e0/0", input_ids=[1], text="?", answer="5", verifier=verifier, row={"n": [1, 2]})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@asynccontextmanager
async def service(port: int = 0, token: str | None = None, **settings: float) -> AsyncIterator[tuple[str, RewardPool]]:
    given = RewardSettings(**{"workers": 2, **settings})  # type: ignore[arg-type]
    async with RewardPool(given, [OBEY]) as pool:
        app = application(pool, given, ["math", OBEY], token)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}", pool
        finally:
            await runner.cleanup()


def client(url: str, verifier: str = OBEY, **settings: float) -> RemoteRewarder:
    remote = open_rewarder(RewardSettings(url=url, **settings), [verifier])  # type: ignore[arg-type]
    assert isinstance(remote, RemoteRewarder)
    return remote


async def test_verdicts_are_the_pool_s() -> None:
    async with service(deadline=2.0) as (url, _), client(url) as rewards:
        assert (await rewards.score(prompt(), "fine")).score == 1.0
        assert (await rewards.score(prompt(), "value 0.25")).score == 0.25
        assert "raised ValueError" in (await rewards.score(prompt(), "raise")).reason
        assert "over its deadline of 2 s" in (await rewards.score(prompt(), "spin")).reason
        assert (await rewards.score(prompt(), "value 1 \ud800")).reason != ""
        metrics = rewards.metrics()
        assert metrics["reward_service/checks"] == 5
        assert metrics["reward_service/no_verdict/timeout"] == 1
        assert metrics["reward_service/no_verdict/error"] == 2
        assert metrics["reward_service/queued"] == 0


async def test_a_service_that_is_started_again_costs_time_and_no_verdict() -> None:
    port = free_port()
    async with service(port) as (url, _):
        rewards = await client(url, queue_timeout=60.0).__aenter__()
        assert (await rewards.score(prompt(), "fine")).score == 1.0
        under_way = asyncio.create_task(rewards.score(prompt(), "sleep 0.3"))
        await asyncio.sleep(0.1)
    async with service(port):
        assert (await under_way).score == 1.0
        assert (await rewards.score(prompt(), "fine")).score == 1.0
        await rewards.__aexit__(None, None, None)


async def test_a_service_that_stays_away_ends_in_no_verdict_that_says_what_was_waited_for() -> None:
    async with service() as (url, _):
        rewards = await client(url, queue_timeout=1.0).__aenter__()
    verdict = await rewards.score(prompt(), "fine")
    await rewards.__aexit__(None, None, None)
    assert verdict.score is None
    assert verdict.kind == "unreachable"
    assert f"a check of row e0/0 by the reward service at {url} was not answered within 1 s" in verdict.reason
    assert rewards.metrics()["reward_service/no_verdict/unreachable"] == 1


async def test_killed_processes_behind_the_service_cost_nothing() -> None:
    async with service() as (url, pool), client(url) as rewards:
        checks = [asyncio.create_task(rewards.score(prompt(), f"value {n}")) for n in range(30)]
        await asyncio.sleep(0.02)
        for pid in (pool.nursery_pid, pool.pids[0]):
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        assert [verdict.score for verdict in await asyncio.gather(*checks)] == list(range(30))


async def test_a_client_that_goes_away_gives_its_place_up() -> None:
    async with service(workers=1, deadline=600.0) as (url, _), client(url) as rewards:
        check = asyncio.create_task(rewards.score(prompt(), "spin"))
        await asyncio.sleep(0.3)
        check.cancel()
        assert (await rewards.score(prompt(), "fine")).score == 1.0


async def test_only_the_verifiers_that_are_offered_are_run() -> None:
    async with service() as (url, _):
        with pytest.raises(UserError, match=r"has no verifier 'os:getcwd'.*start it with --verifier os:getcwd"):
            await client(url, "os:getcwd").__aenter__()
        async with client(url) as rewards:
            verdict = await rewards.score(prompt("os:getcwd"), "")
            assert verdict.score is None
            assert "no verifier 'os:getcwd' here" in verdict.reason


async def test_a_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(token="open sesame") as (url, _):
        with pytest.raises(UserError, match="wants another token: set FLEUVE_REWARDS_TOKEN"):
            await client(url).__aenter__()
        monkeypatch.setenv("FLEUVE_REWARDS_TOKEN", "open sesame")
        async with client(url) as rewards:
            assert (await rewards.score(prompt(), "fine")).score == 1.0


async def test_nobody_there_is_one_clear_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=rf"reward.url = {url}: no reward service answered within .* = 0.5 s"):
        await client(url, start_timeout=0.5).__aenter__()


async def test_what_is_no_check_is_refused() -> None:
    async with service() as (url, _), aiohttp.ClientSession() as session:
        for body in (b"", b"\xc1", b"\x80"):
            async with session.post(f"{url}/score", data=body) as response:
                assert (response.status, (await response.text())[:16]) == (400, "this is no check")
        async with session.get(f"{url}/metrics") as response:
            assert (await response.json())["reward_service/workers"] == 2


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--reward.path", "/nonexistent"], "reward.path = /nonexistent: no such directory"),
        (["--verifier", "code", "--reward.code.seconds", "6"], "reward.code.seconds = 6 needs reward.deadline = 7.1"),
    ],
)
def test_what_the_service_cannot_do_it_says_at_once(flags: list[str], error: str) -> None:
    words = [sys.executable, "-m", "fleuve", "rewards", "serve", "--port", "0", *flags]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {error}")


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fleuve", "rewards", "serve", "--port", "0", "--verifier", OBEY]
    process = subprocess.Popen([*command, "--reward.workers", "2"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"scoring 'math', 'exact', '\S+' in 2 processes, .* on (http://\S+)", line)
        assert match, line

        async def score() -> None:
            async with client(match[1]) as rewards:
                assert (await rewards.score(prompt("math"), r"\boxed{5}")).score == 1.0

        asyncio.run(score())
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
