"""What the pool promises, on real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from fleuve.config.settings import RewardSettings
from fleuve.errors import UserError
from fleuve.rewards.pool import RewardPool
from fleuve.rewards.process import CrashError, VerifierProcess
from fleuve.types import Prompt, Verdict

HERE = Path(__file__).parent
OBEY = "verifiers_for_tests:obey"


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def pool(workers: int = 1, verifier: str = OBEY, **settings: float) -> RewardPool:
    return RewardPool(RewardSettings(workers=workers, **settings), verifiers=[verifier])


def prompt(verifier: str = OBEY, answer: str = "5") -> Prompt:
    return Prompt(id="e0/0", input_ids=[1], text="?", answer=answer, verifier=verifier, row={"answer": answer})


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for is in other processes)
            await asyncio.sleep(0.02)


def kill_nursery(rewards: RewardPool) -> None:
    """The next process will have to load its verifiers anew."""
    assert rewards.nursery_pid is not None
    os.kill(rewards.nursery_pid, signal.SIGKILL)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_maths_is_scored() -> None:
    async with pool(verifier="math") as rewards:
        assert (await rewards.score(prompt("math"), r"\boxed{5}")).score == 1.0
        assert (await rewards.score(prompt("math"), r"\boxed{6}")).score == 0.0
        assert (await rewards.score(prompt("math", "3x"), r"\boxed{2x+x}")).score == 1.0
        assert (await rewards.score(prompt("math"), "\ud800 5")).score == 1.0
        assert rewards.metrics()["reward_service/checks"] == 4


async def test_six_good_checks_lose_nothing_to_an_endless_one_among_them() -> None:
    async with pool(workers=2, deadline=2.0) as rewards:
        start = time.perf_counter()
        finished: dict[str, float] = {}

        async def score(text: str) -> Verdict:
            verdict = await rewards.score(prompt(), text)
            finished[text] = time.perf_counter() - start
            return verdict

        texts = ["spin", *(f"sleep 0.{i}" for i in range(1, 7))]
        verdicts = await asyncio.gather(*map(score, texts))
        assert verdicts[0].score is None
        assert "over its deadline of 2 s" in verdicts[0].reason
        assert [v.score for v in verdicts[1:]] == [1.0] * 6
        # One process did all six, 2.1 s of sleep: longer than the deadline, but waiting is not running.
        assert finished["spin"] == pytest.approx(2.0, abs=0.7)
        assert max(finished.values()) < 6.0


@pytest.mark.parametrize("text", ["spin", "big", "sleep 600"])
async def test_a_check_over_its_deadline_is_killed_and_its_process_replaced(text: str) -> None:
    async with pool(deadline=0.5) as rewards:
        before = rewards.pids
        verdict = await rewards.score(prompt(), text)
        assert verdict.score is None
        assert verdict.seconds == pytest.approx(0.5, abs=0.4)
        assert (await rewards.score(prompt(), "fine")).score == 1.0
        assert rewards.pids != before
        assert gone(before[0])
        assert rewards.metrics()["reward_service/no_verdict/timeout"] == 1


async def test_an_endless_symbolic_comparison_is_excluded_and_not_a_zero() -> None:
    async with pool(verifier="math", deadline=1.0) as rewards:
        hang = prompt("math", r"\sum_{k=1}^{99999999} \sin(k)")
        verdict = await rewards.score(hang, r"\boxed{\prod_{k=1}^{99999999} \cos(k)}")
        assert verdict.score in (None, 0.0)
        assert verdict.seconds < 2.0
        assert (await rewards.score(prompt("math"), "5")).score == 1.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "raised ValueError: no such case"),
        ("sys.exit", "raised SystemExit: 3"),
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("none", "returned NoneType, not a number"),
        ("text", "returned str, not a number"),
        ("memory 9000000000", "raised MemoryError"),
        ("value (_ for _ in ()).throw(ValueError('\\ud800 is lone'))", "raised ValueError: \\ud800 is lone"),
        ("value (_ for _ in ()).throw(SilentError())", "raised SilentError, whose message cannot be had"),
        ("value type('\\xe9', (), {})()", "returned é, not a number"),
        ("value type('Number', (), {'item': lambda self: exit(3)})()", "raised SystemExit: 3"),
        ("value type('Number', (float,), {'__float__': lambda self: 1 / 0})()", "raised ZeroDivisionError"),
    ],
)
async def test_a_failing_reward_function_excludes_the_answer_and_says_why(text: str, reason: str) -> None:
    async with pool(memory_gb=2.0) as rewards:
        before = rewards.pids
        verdict = await rewards.score(prompt(), text)
        assert verdict.score is None
        assert reason in verdict.reason
        assert OBEY in verdict.reason
        assert (await rewards.score(prompt(), "true")).score == 1.0
        assert rewards.pids == before


async def test_whatever_is_one_real_number_is_a_reward() -> None:
    async with pool() as rewards:
        for text, score in {
            "True": 1.0,
            "False": 0.0,
            "2": 2.0,
            "np.bool_(True)": 1.0,
            "np.array(3) > 4": 0.0,
            "np.int64(7)": 7.0,
            "np.uint8(7)": 7.0,
            "np.float16(0.5)": 0.5,
            "np.float32(0.5)": 0.5,
            "np.array(0.25)": 0.25,
            "np.array([0.25])": 0.25,
            "Fraction(1, 4)": 0.25,
            "Decimal('0.25')": 0.25,
        }.items():
            assert (text, (await rewards.score(prompt(), f"value {text}")).score) == (text, score)
        for text, reason in {
            "np.array([1.0, 2.0])": "returned ndarray, not a number",
            "np.array('1.0')": "returned ndarray, not a number",
            "np.complex64(1)": "returned complex64, not a number",
            "1j": "returned complex, not a number",
            "[1.0]": "returned list, not a number",
            "{}": "returned dict, not a number",
            "np.float32('nan')": "returned nan",
            "10**400": "returned inf",
            "-10**400": "returned -inf",
            "Decimal('sNaN')": "returned nan",
        }.items():
            verdict = await rewards.score(prompt(), f"value {text}")
            assert verdict.score is None
            assert reason in verdict.reason


async def test_a_sum_that_is_too_large_for_a_number_is_none() -> None:
    async with pool() as rewards:
        verdict = await rewards.score(prompt(f"9*{OBEY} + 9*{OBEY}"), "value 1.7e307")
    assert verdict.score is None
    assert "adds up to inf" in verdict.reason


async def test_a_row_that_has_no_wire_form_is_excluded_and_says_so() -> None:
    async with pool() as rewards:
        before = rewards.pids
        for value in (10**30, "\ud800", object()):
            bad = Prompt(id="e0/0", input_ids=[1], text="?", answer="5", verifier=OBEY, row={"x": value})
            verdict = await rewards.score(bad, "fine")
            assert verdict.score is None
            assert "row e0/0 cannot be sent to a verifier" in verdict.reason
        assert (await rewards.score(prompt(), "fine")).score == 1.0
        assert rewards.pids == before


class StuckProcess(VerifierProcess):
    """One that the kernel does not let go of, as in a hung file system: its end is not seen in time."""

    async def end(self) -> None:
        raise TimeoutError


async def test_a_process_that_does_not_end_is_replaced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool(deadline=0.3, queue_timeout=10.0) as rewards:
        (worker,) = rewards._workers
        monkeypatch.setattr(worker, "end", StuckProcess.end.__get__(worker))
        assert (await rewards.score(prompt(), "spin")).score is None
        assert (await rewards.score(prompt(), "fine")).score == 1.0
        monkeypatch.undo()


async def test_when_no_process_can_be_started_any_more_each_check_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleuve.rewards.pool._RESTART_PAUSE", (0.0, 0.05))
    module = tmp_path / "short_lived.py"
    module.write_text("import os\ndef f(text, answer, row): return os._exit(1) if text == 'die' else 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name = "short_lived:f"
    async with pool(verifier=name, queue_timeout=600.0) as rewards:
        source = module.read_text()
        module.write_text("import no_such_module\n")
        os.utime(module, (1, 1))
        kill_nursery(rewards)
        async with asyncio.timeout(60.0):
            verdicts = await asyncio.gather(*(rewards.score(prompt(name), "die") for _ in range(5)))
            verdicts.append(await rewards.score(prompt(name), "fine"))
        for verdict in verdicts:
            assert verdict.score is None
            assert "no verifier process can be started" in verdict.reason
            assert "no_such_module" in verdict.reason
        module.write_text(source)
        os.utime(module, (2, 2))
        async with asyncio.timeout(60.0):
            while (await rewards.score(prompt(name), "fine")).score != 1.0:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert (await rewards.score(prompt(name), "fine")).score == 1.0


@pytest.mark.parametrize(("text", "how"), [("kill", "SIGKILL"), ("os._exit", "exit status 0")])
async def test_a_crash_is_tried_again_once_and_then_excluded(text: str, how: str) -> None:
    async with pool() as rewards:
        verdict = await rewards.score(prompt(), text)
        assert verdict.score is None
        assert "crashed its process 2 times" in verdict.reason
        assert how in verdict.reason
        assert rewards.metrics()["reward_service/replaced"] == 2
        assert rewards.metrics()["reward_service/no_verdict/crash"] == 1
        assert (await rewards.score(prompt(), "fine")).score == 1.0


async def test_a_check_whose_process_was_killed_by_another_hand_is_scored_by_the_next(tmp_path: Path) -> None:
    async with pool() as rewards:
        assert (await rewards.score(prompt(), f"once {tmp_path / 'mark'}")).score == 1.0
        os.kill(rewards.pids[0], signal.SIGKILL)
        await asyncio.sleep(0.1)
        assert (await rewards.score(prompt(), "fine")).score == 1.0


async def test_what_user_code_prints_does_not_reach_the_protocol() -> None:
    async with pool() as rewards:
        for _ in range(3):
            assert (await rewards.score(prompt(), "print")).score == 1.0


async def test_what_user_code_prints_is_logged(tmp_path: Path) -> None:
    async with RewardPool(RewardSettings(), verifiers=[OBEY], log_path=tmp_path / "log") as rewards:
        await rewards.score(prompt(), "print")
    assert "noise noise" in (tmp_path / "log").read_text()


async def test_processes_that_user_code_started_end_with_the_check(tmp_path: Path) -> None:
    async with pool(deadline=1.5) as rewards:
        await rewards.score(prompt(), f"child {tmp_path / 'pid'}")
        pid = int((tmp_path / "pid").read_text())
        await until(lambda: gone(pid))


async def test_a_blocking_reward_function_does_not_stall_the_event_loop() -> None:
    async with pool(workers=1) as rewards:
        lags: list[float] = []

        async def watch() -> None:
            while True:
                start = time.perf_counter()
                await asyncio.sleep(0.01)
                lags.append(time.perf_counter() - start)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(rewards.score(prompt(), "sleep 0.2") for _ in range(4)))
        watcher.cancel()
        assert len(lags) > 20
        assert sorted(lags)[len(lags) // 2] < 0.1


async def test_a_late_event_loop_does_not_take_a_finished_check_for_a_hanging_one() -> None:
    async with pool(deadline=0.5) as rewards:
        check = asyncio.create_task(rewards.score(prompt(), "sleep 0.2"))
        await asyncio.sleep(0.05)
        time.sleep(1.0)  # noqa: ASYNC251 (the loop is late on purpose)
        assert (await check).score == 1.0


async def test_waiting_for_a_process_is_bounded() -> None:
    async with pool(queue_timeout=0.3) as rewards:
        busy = asyncio.create_task(rewards.score(prompt(), "sleep 1"))
        await asyncio.sleep(0.05)
        verdict = await rewards.score(prompt(), "fine")
        assert verdict.score is None
        assert "no verifier process was free for 0.3 s" in verdict.reason
        assert (await busy).score == 1.0


async def test_a_cancelled_check_leaves_the_pool_usable() -> None:
    async with pool(deadline=60.0) as rewards:
        check = asyncio.create_task(rewards.score(prompt(), "spin"))
        await asyncio.sleep(0.2)
        check.cancel()
        with pytest.raises(asyncio.CancelledError):
            await check
        assert (await rewards.score(prompt(), "fine")).score == 1.0


async def test_own_functions_by_name_sync_and_async() -> None:
    async with pool(verifier="verifiers_for_tests:length") as rewards:
        assert (await rewards.score(prompt("verifiers_for_tests:length"), "four")).score == 4.0
        assert (await rewards.score(prompt("verifiers_for_tests:patient"), "")).score == 0.5
        assert (await rewards.score(prompt("exact"), " 5\n")).score == 1.0
        verdict = await rewards.score(prompt("verifiers_for_tests:lenght"), "four")
        assert verdict.score is None
        assert "did you mean 'length'" in verdict.reason


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "did you mean 'math'"),
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("verifiers_for_tests:obeys", "has no function 'obeys'; did you mean 'obey'"),
    ],
)
async def test_a_verifier_that_cannot_be_loaded_stops_the_start(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        async with pool(workers=2, verifier=name):
            pass


def dies_while_it_loads(folder: Path, how: str, times: int) -> str:
    """A verifier whose module ends its process the first so many times that it is imported."""
    (folder / "frail.py").write_text(
        "import os, signal\nfrom pathlib import Path\n"
        f"loads = Path({str(folder / 'loads')!r})\nloads.touch()\n"
        "loads.write_text(loads.read_text() + 'x')\n"
        f"if len(loads.read_text()) <= {times}: {how}\n"
        "def f(text, answer, row): return 1.0\n"
    )
    return "frail:f"


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


async def test_processes_that_are_killed_while_they_start_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name = dies_while_it_loads(tmp_path, KILL, 2)
    async with pool(workers=2, verifier=name) as rewards:
        assert (await rewards.score(prompt(name), "")).score == 1.0


async def test_a_nursery_that_is_killed_before_it_has_forked_all_workers_is_started_again() -> None:
    rewards = pool(workers=3)
    opening = asyncio.create_task(rewards.__aenter__())
    while rewards.nursery_pid is None:  # noqa: ASYNC110 (it is set by the task, at once after its first word)
        await asyncio.sleep(0)
    kill_nursery(rewards)
    await opening
    assert (await rewards.score(prompt(), "fine")).score == 1.0
    await rewards.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("how", "loads", "message"),
    [
        (KILL, 3, r"died while it loaded: killed by SIGKILL \(3 times in a row\)"),
        ("os._exit(3)", 1, "died while it loaded: exit status 3$"),
    ],
)
async def test_processes_that_end_by_themselves_or_are_killed_again_and_again_stop_the_start(
    how: str, loads: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CrashError, match=message):
        async with pool(workers=2, verifier=dies_while_it_loads(tmp_path, how, 100)):
            pass
    assert (tmp_path / "loads").read_text() == "x" * loads


@pytest.fixture
async def parent(tmp_path: Path) -> AsyncIterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A process with a pool in the middle of a check that has a child: its pids are the worker's and that child's."""
    code = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1]); import test_pool as t\n"
        "async def main():\n"
        "  async with t.pool(deadline=600.0) as rewards:\n"
        "    open(sys.argv[2] + '.worker', 'w').write(str(rewards.pids[0]))\n"
        "    await rewards.score(t.prompt(), 'child ' + sys.argv[2])\n"
        "asyncio.run(main())"
    )
    arguments = [sys.executable, "-c", code, str(HERE), str(tmp_path / "pid")]
    process = subprocess.Popen(arguments)  # noqa: ASYNC220
    try:
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", seconds=60.0)
        yield process, [int((tmp_path / name).read_text()) for name in ("pid.worker", "pid")]
    finally:
        process.kill()
        process.wait()


async def test_nothing_survives_the_sudden_death_of_the_parent(
    parent: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    process, pids = parent
    assert not any(gone(pid) for pid in pids)
    process.kill()
    await until(lambda: all(gone(pid) for pid in pids))


async def test_nothing_survives_the_end_of_the_pool() -> None:
    async with pool(workers=2) as rewards:
        pids = rewards.pids
        check = asyncio.create_task(rewards.score(prompt(), "spin"))
        await asyncio.sleep(0.2)
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)
    assert (await check).score is None


async def test_a_pool_that_is_closed_while_it_starts_leaves_nothing() -> None:
    opening = asyncio.create_task(pool(workers=2).__aenter__())
    await asyncio.sleep(0.02)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(lambda: not psutil.Process().children())


@pytest.mark.slow
async def test_not_even_one_endless_call_into_c_survives_the_parent_for_long(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys; sys.path.insert(0, sys.argv[1]); import test_pool as t\n"
        "async def main():\n"
        "  async with t.pool(deadline=1.0) as rewards:\n"
        "    print(rewards.pids[0], flush=True)\n"
        "    asyncio.get_running_loop().call_later(0.5, os._exit, 0)\n"
        "    await rewards.score(t.prompt(), 'big')\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-c", code, str(HERE)], capture_output=True, text=True, timeout=60, check=True
    )
    # It holds the interpreter's lock, so nothing of ours can end it: the kernel's bound on its CPU time does.
    await until(lambda: gone(int(done.stdout)), seconds=120.0)
