"""What the fork server promises: warm workers, apart from each other, which follow the pool and not their nursery."""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from fleuve.config.settings import RewardSettings
from fleuve.rewards.nursery import Nursery
from fleuve.rewards.pool import RewardPool
from fleuve.rewards.process import CrashError
from fleuve.rewards.protocol import WorkerOptions
from fleuve.types import Prompt

HERE = Path(__file__).parent
OBEY = "verifiers_for_tests:obey"


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(tmp_path)]))


@pytest.fixture
async def rewards() -> AsyncIterator[RewardPool]:
    async with RewardPool(RewardSettings(workers=2), verifiers=[OBEY]) as pool:
        yield pool


def prompt(verifier: str = OBEY) -> Prompt:
    return Prompt(id="e0/0", input_ids=[1], text="?", answer="5", verifier=verifier, row={})


def kill_nursery(rewards: RewardPool) -> int:
    pid = rewards.nursery_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


async def ask(rewards: RewardPool, expression: str) -> float:
    verdict = await rewards.score(prompt(), f"value {expression}")
    assert verdict.score is not None, verdict.reason
    return verdict.score


async def test_a_worker_is_replaced_without_loading_the_verifiers_again(tmp_path: Path) -> None:
    (tmp_path / "slow_to_load.py").write_text("import time\ntime.sleep(1)\ndef f(text, answer, row): return 1.0\n")
    name = "slow_to_load:f"
    async with RewardPool(RewardSettings(), verifiers=[name]) as rewards:
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            os.kill(rewards.pids[0], signal.SIGKILL)
            assert (await rewards.score(prompt(name), "")).score == 1.0
            seconds.append(time.perf_counter() - start)
        assert statistics.median(seconds) < 1.0


async def test_each_worker_is_in_a_group_of_its_own(rewards: RewardPool) -> None:
    groups = {os.getpgid(pid) for pid in rewards.pids}
    assert groups == set(rewards.pids)
    assert rewards.nursery_pid not in groups


async def test_the_nursery_has_one_thread(rewards: RewardPool) -> None:
    assert psutil.Process(rewards.nursery_pid).num_threads() == 1


async def test_a_verifier_that_starts_threads_is_loaded_by_each_worker(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import os, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "LOADED_IN = os.getpid()\n"
        "def f(text, answer, row): return float(LOADED_IN == os.getpid())\n"
    )
    name = "threaded:f"
    async with RewardPool(RewardSettings(start_timeout=300.0), verifiers=[name, "math"]) as rewards:
        assert (await rewards.score(prompt(name), "")).score == 1.0
        assert (await rewards.score(prompt("math"), "5")).score == 1.0
        assert psutil.Process(rewards.nursery_pid).num_threads() == 1
        os.kill(rewards.pids[0], signal.SIGKILL)
        assert (await rewards.score(prompt(name), "")).score == 1.0


async def test_workers_hold_no_descriptor_of_another(rewards: RewardPool) -> None:
    """Standard streams, its socket, the lifeline: a pipe or socket more would keep another's end from being seen."""
    for pid in rewards.pids:
        held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert len([name for name in held if name.startswith("socket:")]) == 1
        assert len([name for name in held if name.startswith("pipe:")]) <= 1 + 1  # and where signals are noted


async def test_workers_do_not_draw_the_same_random_numbers() -> None:
    async with RewardPool(RewardSettings(workers=2), verifiers=[OBEY, "verifiers_for_tests:draw"]) as rewards:
        drawn = []
        for _ in range(6):
            drawn.append((await rewards.score(prompt("verifiers_for_tests:draw"), "")).score)
            for pid in rewards.pids:
                os.kill(pid, signal.SIGKILL)
        assert len(set(drawn)) == len(drawn)


async def test_limits_hold_in_every_worker() -> None:
    async with RewardPool(RewardSettings(memory_gb=1.0, deadline=3.0), verifiers=[OBEY]) as rewards:
        for _ in range(2):
            assert (await rewards.score(prompt(), "fine")).score == 1.0
            assert psutil.Process(rewards.pids[0]).rlimit(psutil.RLIMIT_DATA)[0] == 2**30
            assert psutil.Process(rewards.pids[0]).rlimit(psutil.RLIMIT_CPU)[0] <= 3 + 10 + 2
            await rewards.score(prompt(), "os._exit")


async def test_a_worker_goes_on_when_the_nursery_is_killed(rewards: RewardPool) -> None:
    running = asyncio.create_task(rewards.score(prompt(), "sleep 0.5"))
    await asyncio.sleep(0.1)
    kill_nursery(rewards)
    assert (await running).score == 1.0
    assert rewards.metrics()["reward_service/replaced"] == 0


async def test_a_worker_that_outlived_its_nursery_is_killed_at_its_deadline_and_replaced() -> None:
    async with RewardPool(RewardSettings(deadline=0.5), verifiers=[OBEY]) as rewards:
        old = kill_nursery(rewards)
        assert "over its deadline" in (await rewards.score(prompt(), "spin")).reason
        assert (await rewards.score(prompt(), "fine")).score == 1.0
        assert rewards.nursery_pid not in (None, old)


async def test_a_nursery_that_died_idle_is_replaced_before_it_is_needed(rewards: RewardPool) -> None:
    old = kill_nursery(rewards)
    async with asyncio.timeout(20.0):
        while rewards.nursery_pid in (None, old):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_workers_that_lost_their_nursery_are_replaced_when_they_are_idle(rewards: RewardPool) -> None:
    running = asyncio.create_task(rewards.score(prompt(), "sleep 2"))
    await asyncio.sleep(0.1)
    before = set(rewards.pids)
    kill_nursery(rewards)
    async with asyncio.timeout(30.0):
        while before & set(rewards.pids):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (await running).score == 1.0
    assert await ask(rewards, "1") == 1.0
    assert rewards.metrics()["reward_service/replaced"] == 0


@pytest.mark.parametrize("settings", [{"recycle_after": 3}, {"recycle_mb": 1.0}])
async def test_a_worker_is_recycled_when_it_has_checked_much_or_grown(settings: dict[str, float]) -> None:
    async with RewardPool(RewardSettings(**settings), verifiers=[OBEY]) as rewards:  # type: ignore[arg-type]
        seen = set()
        for _ in range(9):
            seen.add(await ask(rewards, "__import__('os').getpid()"))
        assert len(seen) == (3 if "recycle_after" in settings else 9)
        assert rewards.metrics()["reward_service/recycled"] >= 2
        assert rewards.metrics()["reward_service/replaced"] == 0


async def test_a_full_queue_lets_checks_wait_and_loses_none() -> None:
    settings = RewardSettings(workers=2, queue_size=3)
    async with RewardPool(settings, verifiers=[OBEY]) as rewards:
        verdicts = await asyncio.gather(*(rewards.score(prompt(), "fine") for _ in range(50)))
        assert [verdict.score for verdict in verdicts] == [1.0] * 50


async def test_a_queue_that_stays_full_ends_in_no_verdict() -> None:
    settings = RewardSettings(queue_mb=0.001, queue_timeout=0.5, deadline=60.0)
    async with RewardPool(settings, verifiers=[OBEY]) as rewards:
        busy = asyncio.create_task(rewards.score(prompt(), "sleep 3" + " " * 1000))
        await asyncio.sleep(0.05)
        verdict = await rewards.score(prompt(), "fine" + " " * 1000)
        assert verdict.score is None
        assert "the queue of verifier processes was full for 0.5 s" in verdict.reason
        busy.cancel()


async def test_a_nursery_that_is_stopped_is_given_up_for_another() -> None:
    nursery = await Nursery.start(WorkerOptions(verifiers=(OBEY,), cpu_seconds=10.0, memory=2**32), 60.0)
    try:
        os.kill(nursery.pid, signal.SIGSTOP)
        with pytest.raises(CrashError, match=r"no verifier process was forked within 0\.5 s"):
            await nursery.fork(0.5)
        async with asyncio.timeout(5):
            await nursery.died
    finally:
        await nursery.end()
