"""The sandbox: what it allows, what it costs a program to go past its limits, and what its own failures are."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fleuve.config.reward_checks import sandbox_line
from fleuve.config.settings import RewardSettings
from fleuve.errors import UserError
from fleuve.rewards.code.options import CodeOptions
from fleuve.rewards.code.verify import ROLES, CodeVerifier
from fleuve.rewards.sandbox import level
from fleuve.rewards.sandbox.client import SandboxServer
from fleuve.rewards.sandbox.clock import Clock
from fleuve.rewards.sandbox.filter import supported
from fleuve.rewards.sandbox.limits import Limits
from fleuve.rewards.sandbox.run import Run, SandboxError, describe, supervise

LIMITS = Limits(seconds=1.0, cpu_seconds=0.3, memory=96 * 2**20, output=10_000)
PATIENCE = 60.0
ROW = {"tests": ["assert f(1) == 1"]}
RIGHT = "def f(x): return x"


@pytest.fixture(scope="module", params=["namespaces", "limits"])
def server(request: pytest.FixtureRequest) -> Iterator[SandboxServer]:
    try:
        server = SandboxServer(request.param, ROLES)
    except SandboxError as error:
        pytest.skip(str(error))
    yield server
    server.close()


def patient() -> Callable[[float, float], None]:
    """Nothing ends before its limits, but everything does some time."""
    return Clock(PATIENCE, PATIENCE, PATIENCE, lambda seconds: None).check


def run(server: SandboxServer, source: str, stdin: bytes = b"", limits: Limits = LIMITS) -> tuple[str, Run]:
    with server.open(limits) as sandbox:
        program = sandbox.start("program", {"source": source}, stdin)
        over = supervise([program], program, limits.seconds, patient()).limit
        program.close()
    assert psutil.Process(server.pid).children(recursive=True) == []
    return over, program


def test_a_program_reads_its_input_and_writes_its_output(server: SandboxServer) -> None:
    over, program = run(server, "import sys\nprint(input()[::-1])\nprint('oh', file=sys.stderr)\nexit(3)", b"abc\n")
    assert (over, program.status, program.output) == ("", 3, b"cba\n")
    assert program.errors == b"oh\n"


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("import time\ntime.sleep(3600)", "time"),
        ("while True: pass", "cpu"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
        (
            "import os, time\nfor _ in range(2): os.fork()\nx = bytearray(48 * 2**20)\n"
            "for i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(3600)",
            "memory",
        ),
    ],
)
def test_the_limit_that_was_reached_is_named(source: str, limit: str, server: SandboxServer) -> None:
    over, program = run(server, source)
    assert over == limit
    assert program.status is None


CHAINS = {
    "who leave their children to others": "os.fork() and rest()\nwhile True:\n  burn()\n  os.fork() and os._exit(0)",
    "who wait for them": "while True:\n  if os.fork() == 0:\n    burn()\n    os._exit(0)\n  os.wait()",
}


@pytest.mark.skipif(not supported(), reason="with SIGCHLD ignored they are forgotten, if no filter sees to it")
@pytest.mark.parametrize("name", CHAINS)
def test_cpu_time_of_processes_that_live_between_two_looks_is_counted(name: str, server: SandboxServer) -> None:
    burn = (
        "import os, signal, time\ntry: signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nexcept OSError: pass\n"
        "def burn():\n  until = time.process_time() + 0.005\n  while time.process_time() < until: pass\n"
        "def rest(): time.sleep(3600)\n"
    )
    source = burn + CHAINS[name]
    over, _ = run(server, source, limits=dataclasses.replace(LIMITS, seconds=PATIENCE))
    assert over == "cpu"


def test_cpu_time_of_one_program_is_not_the_next_one_s(server: SandboxServer) -> None:
    limits = dataclasses.replace(LIMITS, seconds=30.0, cpu_seconds=0.5)
    burn = "import os, time\nif os.fork() == 0:\n  while time.process_time() < 0.2: pass\nelse: os.wait()"
    with server.open(limits) as sandbox:
        for _ in range(4):
            program = sandbox.start("program", {"source": burn})
            assert supervise([program], program, limits.seconds, patient()).limit == ""
            assert program.status == 0


def test_a_signal_is_told(server: SandboxServer) -> None:
    _, program = run(server, "import os\nos.kill(os.getpid(), 11)")
    assert program.status == -signal.SIGSEGV
    assert describe(-signal.SIGSEGV) == "killed by SIGSEGV"


def test_one_process_alone_has_less_memory_than_the_limit(server: SandboxServer) -> None:
    _, program = run(server, "x = bytearray(2**31)")
    assert program.status == 1
    assert b"MemoryError" in program.errors


def test_programs_of_one_sandbox_share_its_files_and_nothing_runs_on(server: SandboxServer) -> None:
    with server.open(LIMITS) as sandbox:
        outputs = []
        for source in (
            "import os\nopen('x-for-test', 'w').write('1')\nif os.fork() == 0:\n  import time; time.sleep(3600)",
            "import os\nprint(open('x-for-test').read())\nos.remove('x-for-test')",
        ):
            program = sandbox.start("program", {"source": source})
            assert supervise([program], program, 30.0, patient()).limit == ""
            outputs.append(program.output)
    assert outputs == [b"", b"1\n"]
    assert not Path("/x-for-test").exists()


def test_the_scratch_folder_is_empty_and_goes_with_the_sandbox(server: SandboxServer) -> None:
    _, program = run(server, "import os\nprint(os.listdir())\nopen('x', 'w').close()\nprint(os.getcwd())")
    listed, folder = program.output.decode().splitlines()
    assert listed == "[]"
    assert folder == "/tmp" or not Path(folder).exists()


def test_a_program_s_process_group_is_its_own(server: SandboxServer) -> None:
    # A group is seen through process namespaces: in its parent's, a program of the same user could kill all of them.
    _, program = run(server, "import os\nos.killpg(0, 9)")
    assert program.status == -signal.SIGKILL
    assert server.alive


def test_sandboxes_share_nothing() -> None:
    try:
        server = SandboxServer("namespaces", ROLES)
    except SandboxError as error:
        pytest.skip(str(error))
    with server:
        _, program = run(server, "import os\nopen('x', 'w').write('1')\nprint(os.listdir())")
        assert program.output == b"['x']\n"
        _, program = run(server, "import os\nprint(os.listdir(), os.getpid(), len(os.listdir('/etc')) < 5)")
        assert program.output == b"[] 2 True\n"


def test_the_weakest_level_has_to_be_allowed() -> None:
    with pytest.raises(UserError, match="allow_weak_sandbox = true"):
        CodeVerifier(CodeOptions(sandbox="limits"))
    weak = CodeVerifier(CodeOptions(sandbox="limits", allow_weak_sandbox=True, deadline=PATIENCE))
    try:
        assert weak(RIGHT, ROW) == 1.0
        assert weak("def f(x): return 2", ROW) == 0.0
    finally:
        weak.close()
    assert "weakest" in level.describe("limits")


def test_where_namespaces_cannot_be_had_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr("fleuve.rewards.sandbox.namespaces.write_maps", refuse)
    with pytest.raises(UserError, match=r"namespaces cannot be had.*not here"):
        CodeVerifier(CodeOptions())


def test_a_server_that_died_is_replaced_and_its_check_tried_again() -> None:
    verifier = CodeVerifier(CodeOptions(sandbox="limits", allow_weak_sandbox=True, deadline=PATIENCE))
    verifier.warm()
    assert verifier._server is not None
    os.kill(verifier._server.pid, signal.SIGKILL)
    try:
        assert verifier(RIGHT, ROW) == 1.0
    finally:
        verifier.close()


def test_a_sandbox_that_is_killed_from_outside_is_no_verdict(server: SandboxServer) -> None:
    with server.open(LIMITS) as sandbox:
        program = sandbox.start("program", {"source": "import time\ntime.sleep(3600)"})
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="ended before its program"):
            supervise([program], program, 30.0, patient())
        program.close()


def test_a_program_that_could_not_be_started_is_no_verdict(server: SandboxServer) -> None:
    # More memory than there are numbers for: the limit cannot be set, in the process that was to become the program.
    with server.open(dataclasses.replace(LIMITS, memory=2**70)) as sandbox:
        program = sandbox.start("program", {"source": "print(1)"})
        with pytest.raises(SandboxError, match="ended before its program"):
            supervise([program], program, 30.0, patient())
        program.close()


def test_nothing_outlives_the_verifier_process() -> None:
    script = (
        "import os, sys, time\nfrom fleuve.rewards.code.verify import ROLES\n"
        "from fleuve.rewards.sandbox.client import SandboxServer\nfrom fleuve.rewards.sandbox.limits import Limits\n"
        f"server = SandboxServer({level.choose('auto', True)!r}, ROLES)\nsandbox = server.open(Limits())\n"
        "run = sandbox.start('program', {'source': 'import os, time\\nos.fork() or os.setsid()\\n"
        "print(1, flush=True)\\ntime.sleep(3600)'})\n"
        "os.read(run._output, 1)\nprint(server.pid, flush=True)\ntime.sleep(3600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    family = [server, *server.children(recursive=True)]
    assert len(family) >= 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert alive == []


def rewards(**code: object) -> RewardSettings:
    return RewardSettings.model_validate({"code": code})


def test_a_run_says_which_level_is_active() -> None:
    allowed = rewards(sandbox="limits", allow_weak_sandbox=True)
    line = sandbox_line(allowed, ["math", "0.5*code - rewards:long"])
    assert line.startswith("sandbox for programs: limits (resource limits alone, the weakest")
    assert sandbox_line(rewards(), ["math"]) == sandbox_line(rewards(), ["my.code:check"]) == ""
    with pytest.raises(UserError, match="allow_weak_sandbox"):
        sandbox_line(rewards(sandbox="limits"), ["code"])
