"""Kill -9 on workers and nursery, at any time: every check ends with its true score."""

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from fleuve.config.settings import RewardSettings
from fleuve.rewards.pool import RewardPool
from fleuve.types import Prompt

HERE = Path(__file__).parent
LENGTH = "verifiers_for_tests:length_slowly"


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def prompt() -> Prompt:
    return Prompt(id="e0/0", input_ids=[1], text="?", answer="5", verifier=LENGTH, row={})


def kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", [1, 2])
async def test_of_200_checks_each_ends_with_its_true_score_unless_its_process_is_killed_twice(seed: int) -> None:
    """A check that was hit waits for its second attempt behind all others, so a few meet another kill there."""
    draw = random.Random(seed)
    kills = 0
    async with RewardPool(RewardSettings(workers=3, deadline=60.0), verifiers=[LENGTH]) as rewards:

        async def killer() -> None:
            nonlocal kills
            while True:
                await asyncio.sleep(draw.uniform(0.0, 0.1))
                if draw.random() < 0.2:
                    kill(rewards.nursery_pid)
                elif rewards.pids:
                    kill(draw.choice(rewards.pids))
                    kills += 1

        killing = asyncio.create_task(killer())
        async with asyncio.timeout(120.0):
            verdicts = await asyncio.gather(*(rewards.score(prompt(), "x" * n) for n in range(200)))
        killing.cancel()
        assert kills >= 5
        for n, verdict in enumerate(verdicts):
            assert verdict.score == n or (verdict.score is None and "crashed its process 2 times" in verdict.reason)
        assert sum(verdict.score is None for verdict in verdicts) <= kills / 2


async def test_all_of_them_at_once_loses_nothing_that_was_not_under_way() -> None:
    async with RewardPool(RewardSettings(workers=3), verifiers=[LENGTH]) as rewards:
        for _ in range(3):
            for pid in [*rewards.pids, rewards.nursery_pid]:
                kill(pid)
            verdicts = await asyncio.gather(*(rewards.score(prompt(), "x" * n) for n in range(6)))
            assert [verdict.score for verdict in verdicts] == list(range(6))


async def test_under_a_hail_of_kills_no_score_is_untrue_and_the_pool_lives() -> None:
    draw = random.Random(3)
    async with RewardPool(RewardSettings(workers=2), verifiers=[LENGTH]) as rewards:

        async def killer() -> None:
            while True:
                await asyncio.sleep(draw.uniform(0.0, 0.03))
                kill(draw.choice([*rewards.pids, rewards.nursery_pid]))

        killing = asyncio.create_task(killer())
        await asyncio.sleep(1.0)
        checks = [asyncio.create_task(rewards.score(prompt(), "x" * n)) for n in range(30)]
        await asyncio.sleep(1.0)
        killing.cancel()
        async with asyncio.timeout(60.0):
            verdicts = await asyncio.gather(*checks)
        for number, verdict in enumerate(verdicts):
            assert verdict.score in (number, None)
            assert (
                verdict.score is not None
                or "crashed its process 2 times: killed by SIGKILL" in verdict.reason
                or ("it ended" in verdict.reason)
            )
        assert (await rewards.score(prompt(), "four")).score == 4.0


async def test_idle_workers_that_are_stopped_cost_their_check_seconds_and_are_replaced() -> None:
    async with RewardPool(RewardSettings(workers=2, deadline=60.0), verifiers=[LENGTH]) as rewards:
        stopped = rewards.pids
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(20.0):  # the time after which one that is only slow is given up is longer
            verdicts = await asyncio.gather(*(rewards.score(prompt(), "x" * n) for n in range(4)))
        assert [verdict.score for verdict in verdicts] == [0, 1, 2, 3]
        assert not set(stopped) & set(rewards.pids)


async def test_idle_workers_that_stand_still_for_a_moment_keep_their_place() -> None:
    async with RewardPool(RewardSettings(workers=1, deadline=60.0), verifiers=[LENGTH]) as rewards:
        (pid,) = rewards.pids
        os.kill(pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.3, os.kill, pid, signal.SIGCONT)
        assert (await rewards.score(prompt(), "xxx")).score == 3
        assert rewards.pids == [pid]
