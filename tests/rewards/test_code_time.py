"""Time: what a program takes counts, what it waits for a core does not; neither is taken for the other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleuve.config.settings import CodeSettings, RewardSettings
from fleuve.errors import UserError
from fleuve.rewards.code.options import CodeOptions, deadline_for
from fleuve.rewards.code.verify import ROLES, CodeVerifier
from fleuve.rewards.pool import RewardPool
from fleuve.rewards.sandbox.client import SandboxServer
from fleuve.rewards.sandbox.clock import Clock, OverBudgetError
from fleuve.rewards.sandbox.inside import children
from fleuve.rewards.sandbox.level import choose
from fleuve.rewards.sandbox.limits import Limits
from fleuve.rewards.sandbox.run import SandboxError
from fleuve.rewards.sandbox.watch import Watch, _Rank
from fleuve.types import Prompt

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
ROW = {"tests": ["assert f(1) == 1"]}
SPIN = "def f(x):\n  while True: pass"
WORKS = "import time\ndef f(x):\n  while time.process_time() < 0.4: pass\n  return x"
"""Right, after four tenths of a second of CPU time."""


@pytest.fixture
def one_core() -> Iterator[None]:
    """This process, and all that it starts, share one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def crowd(one_core: None) -> Iterator[None]:
    """Others who want that core."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(5)]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.fixture(autouse=True)
def walls() -> None:
    try:
        choose("auto", False)
    except UserError as error:
        pytest.skip(str(error))


async def scores(sources: list[str], cpu: float = 0.6, **settings: Any) -> list[tuple[float | None, str]]:
    """Of all programs at once, a verifier process for each."""
    code = CodeSettings(seconds=cpu + 0.2, cpu_seconds=cpu)
    prompt = Prompt(id="p", input_ids=[1], text="", answer="", verifier="code", row=ROW)
    async with RewardPool(RewardSettings(workers=len(sources), code=code, **settings), ["code"]) as pool:
        verdicts = await asyncio.gather(*(pool.score(prompt, source) for source in sources))
    return [(verdict.score, verdict.reason) for verdict in verdicts]


async def test_hanging_programs_that_share_a_core_score_zero(one_core: None) -> None:
    # Together they need 2.4 s of that core, longer than the deadline.
    assert await scores([SPIN] * 6, cpu=0.4, deadline=2.0) == [(0.0, "")] * 6


async def test_a_right_program_that_hardly_gets_a_core_scores_one(crowd: None) -> None:
    # With a sixth of a core it takes 2.4 s: over its limit on the clock, and over the deadline.
    assert await scores([WORKS], deadline=2.0) == [(1.0, "")]


async def test_sleeping_is_no_waiting(crowd: None) -> None:
    started = time.monotonic()
    assert await scores(["import time\ndef f(x): time.sleep(3600)"], deadline=1.0) == [(0.0, "")]
    assert time.monotonic() - started < 20.0


def test_a_program_that_wants_to_come_last_is_over_its_time_all_the_same(crowd: None) -> None:
    humble = (
        "import os\nidle = os.sched_param(0)\n"
        "for f in (lambda: os.sched_setscheduler(0, os.SCHED_IDLE, idle), lambda: os.nice(19)):\n"
        "  try: f()\n  except OSError: pass\n"
    )
    verifier = CodeVerifier(CodeOptions(seconds=0.3, cpu_seconds=0.2, deadline=1.0))
    try:
        verifier.warm()
        assert verifier(humble + SPIN, ROW) == 0.0
    finally:
        verifier.close()


IDLE = "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))"


@pytest.mark.parametrize(
    "how", ["os.setpriority(os.PRIO_PROCESS, pid, 19)", pytest.param(IDLE, marks=pytest.mark.slow)]
)
def test_no_waiting_is_excused_that_a_program_brought_upon_itself(how: str, crowd: None) -> None:
    """Nor where no filter of system calls keeps it from doing so."""
    source = f"import os\npid = os.fork()\nwhile pid == 0: pass\n{how}\nprint(flush=True)\nos.wait()"
    with subprocess.Popen([sys.executable, "-S", "-c", source], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        watch = Watch(first.pid, time.monotonic())
        for _ in range(10):
            time.sleep(0.05)
            used = watch.look(time.monotonic())
        os.kill(children(first.pid)[0], signal.SIGKILL)
    assert used.processes == 1
    assert used.waited == 0.0


def test_who_comes_last_by_his_own_doing() -> None:
    own = _Rank(nice=5, group_nice=0, policy=0, cores=frozenset({0, 1}))
    assert not own.humbler(own)
    assert not own._replace(nice=0, cores=frozenset({0, 1, 2})).humbler(own)
    for other in ({"nice": 6}, {"group_nice": 1}, {"policy": 5}, {"policy": 3}, {"cores": frozenset({0})}):
        assert own._replace(**other).humbler(own)


def test_threads_that_keep_each_other_waiting_gain_no_time(one_core: None) -> None:
    source = "import os\nfor _ in range(2): os.fork()\nwhile True: pass"
    verifier = CodeVerifier(CodeOptions(seconds=1.5, cpu_seconds=1.0, deadline=4.0))
    try:
        verifier.warm()
        started = time.monotonic()
        assert verifier(source, {"cases": [{"input": "", "output": "1"}]}) == 0.0
        assert time.monotonic() - started < 3.0 + 12.0  # much room for others on this core
    finally:
        verifier.close()


def test_what_a_program_waited_is_seen_from_outside(crowd: None) -> None:
    with SandboxServer(choose("auto", False), ROLES) as server, server.open(Limits()) as sandbox:
        started = time.monotonic()
        watch = Watch(sandbox.pid, started)
        program = sandbox.start("program", {"source": "while True: pass"})
        for _ in range(20):
            time.sleep(0.05)
            used = watch.look(time.monotonic())
        elapsed = time.monotonic() - started
        program.close()
    assert 0.0 < used.ran < 0.8 * elapsed
    assert used.waited > 0.2 * elapsed
    assert used.ran + used.waited < elapsed + 0.1


@pytest.fixture
def verifier() -> Iterator[CodeVerifier]:
    verifier = CodeVerifier(CodeOptions(seconds=0.8, cpu_seconds=0.8, deadline=1.0))
    yield verifier
    verifier.close()


SLEEPS = "import time\ntime.sleep(0.3)\nprint(input())"


def test_cases_that_take_too_long_together_are_no_verdict(verifier: CodeVerifier) -> None:
    row = {"cases": [{"input": str(i), "output": str(i)} for i in range(4)]}
    with pytest.raises(OverBudgetError, match=r"more than 0.85 s together, which is what reward.deadline = 1 s leaves"):
        verifier(SLEEPS, row)
    assert verifier(SLEEPS, {"cases": row["cases"][:2]}) == 1.0


LAST = "import time\nn = input()\ntime.sleep(0.5)\nwhile n == '1': {}\nprint(n)"
CASES = {"cases": [{"input": n, "output": n} for n in "01234567"]}


@pytest.mark.parametrize("how", ["time.sleep(3600)", "pass"])
def test_a_case_that_hangs_scores_zero_wherever_it_stands(how: str, verifier: CodeVerifier) -> None:
    assert verifier(LAST.format(how), CASES) == 0.0


async def test_the_pool_waits_until_the_case_that_runs_is_over_its_own_time() -> None:
    code = CodeSettings(seconds=0.8, cpu_seconds=0.8)
    prompt = Prompt(id="p", input_ids=[1], text="", answer="", verifier="code", row=CASES)
    async with RewardPool(RewardSettings(deadline=1.0, code=code), ["code"]) as pool:
        verdict = await pool.score(prompt, LAST.format("time.sleep(3600)"))
    assert (verdict.score, verdict.reason) == (0.0, "")


def test_cases_that_failed_before_the_time_was_over_decide(verifier: CodeVerifier) -> None:
    row = {"cases": [{"input": "0", "output": "0"}, {"input": "1", "output": "2"}, *[{"output": "3"}] * 9]}
    assert verifier(SLEEPS, row) == 0.0


def test_a_time_limit_that_the_deadline_does_not_leave_room_for_is_no_verdict() -> None:
    options = CodeOptions(deadline=5.0)
    assert options.limits({"time_limit": 4}).cpu_seconds == 4.0
    assert options.limits({"time_limit": 4}).seconds == pytest.approx(4.25)
    with pytest.raises(ValueError, match=r"needs reward\.deadline = 5\.9 or more, not 5"):
        options.limits({"time_limit": 5})
    assert CodeOptions(deadline=deadline_for(5)).limits({"time_limit": 5}).cpu_seconds == 5.0


@given(deadline=st.floats(0.1, 100.0), seconds=st.floats(0.1, 100.0), cpu=st.floats(0.1, 100.0))
def test_whatever_the_settings_a_program_is_over_its_own_limits_before_the_check_is(
    deadline: float, seconds: float, cpu: float
) -> None:
    options = CodeOptions(deadline=deadline, seconds=seconds, cpu_seconds=cpu)
    limits = options.limits({})
    assert max(limits.seconds, limits.cpu_seconds) <= options.budget < deadline < options.longest


looks = st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0.0, 1.0)), max_size=300)


@given(st.lists(looks, max_size=6))
def test_a_check_never_outlasts_its_promise(programs: list[list[tuple[float, float]]]) -> None:
    """Of each program, `steps`: seconds to the next look, and the share of them in which it had its core."""
    promises = [2.0]
    clock = Clock(deadline=2.0, budget=1.7, longest=20.0, promise=promises.append)
    now, limit, spent = clock.started, 1.6, 0.0
    try:
        for steps in programs:
            clock.check(now)
            assert spent < 1.7
            taken = 0.0
            for step, share in steps:
                assert now - clock.started < promises[-1]
                clock.check(now, taken)
                if taken >= limit:
                    break
                now, taken = now + step, taken + share * step
            clock.add(taken)
            spent += taken
    except OverBudgetError:
        assert spent >= 1.7
    except SandboxError:
        assert now - clock.started >= 20.0
    assert promises == sorted(promises)


def test_a_program_that_runs_is_never_over_the_budget_of_all() -> None:
    clock = Clock(deadline=2.0, budget=1.7, longest=20.0, promise=lambda seconds: None)
    clock.add(1.6)
    clock.check(clock.started + 1.6)
    clock.check(clock.started + 3.0, 1.4)
    clock.add(1.4)
    with pytest.raises(OverBudgetError):
        clock.check(clock.started + 3.1)


def test_a_check_that_only_waits_ends_too_and_says_what_for() -> None:
    clock = Clock(deadline=2.0, budget=1.7, longest=20.0, promise=lambda seconds: None)
    clock.check(clock.started + 19.9, 0.5)
    with pytest.raises(SandboxError, match=r"for 19.5 of 20.0 s no core was free"):
        clock.check(clock.started + 20.0, 0.5)
