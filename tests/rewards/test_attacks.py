"""No attack passes, outlives its check or touches the host. Every program of `attacks` is one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from attacks import EXHAUST, FORGE, KERNEL, REACH, reach

from fleuve.errors import UserError
from fleuve.rewards.code.options import CodeOptions
from fleuve.rewards.code.verify import CodeVerifier
from fleuve.rewards.sandbox.filter import supported

FUNCTION = {"tests": ["assert answer(20) == 42", "assert answer(3) == 8"]}
SECONDS = 60.0
"""Far more than any check should take, for machines that are busy."""
OPTIONS = CodeOptions(seconds=1.0, cpu_seconds=0.3, memory_mb=96, output_kb=64, scratch_mb=4, deadline=SECONDS)


class Host(NamedTuple):
    folder: Path
    process: subprocess.Popen[bytes]
    listener: socket.socket
    abstract: socket.socket
    names: dict[str, str]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """What an attack would reach: a file, a process, listening sockets, a secret in the environment."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "canary").write_text("alive")
    os.environ["FLEUVE_SECRET"] = "secret"
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0fleuve-{os.getpid()}")
        abstract.listen()
        with socket.socket(socket.AF_UNIX) as in_folder:
            in_folder.bind(str(folder / "socket"))
            in_folder.listen()
            names = {
                "canary": str(folder / "canary"),
                "folder": str(folder),
                "tests": __file__,
                "port": str(listener.getsockname()[1]),
                "abstract": f"fleuve-{os.getpid()}",
                "pid": str(process.pid),
            }
            yield Host(folder, process, listener, abstract, names)
    process.kill()
    process.wait()
    del os.environ["FLEUVE_SECRET"]


@pytest.fixture(scope="module")
def verifier(host: Host) -> Iterator[CodeVerifier]:
    try:
        verifier = CodeVerifier(OPTIONS)
    except UserError as error:
        pytest.skip(str(error))
    verifier.warm()
    yield verifier
    verifier.close()


def score(verifier: CodeVerifier, source: str, host: Host) -> float:
    """Of one program; the host is as it was, and nothing is left of the program."""
    for name, value in host.names.items():
        source = source.replace("{" + name + "}", value)
    started = time.monotonic()
    result = verifier("```python\n" + textwrap.dedent(source) + "\n```", FUNCTION)
    assert time.monotonic() - started < SECONDS
    assert sorted(path.name for path in host.folder.iterdir()) == ["canary", "socket"]
    assert (host.folder / "canary").read_text() == "alive"
    assert host.process.poll() is None
    host.listener.settimeout(0)
    with pytest.raises(BlockingIOError):
        host.listener.accept()
    assert verifier._server is not None
    assert verifier._server.alive
    assert psutil.Process(verifier._server.pid).children(recursive=True) == []
    return result


def test_a_right_program_passes_where_the_attacks_do_not(verifier: CodeVerifier, host: Host) -> None:
    assert score(verifier, "def answer(n): return 2 * n + 2", host) == 1.0
    assert score(verifier, reach("reached = True"), host) == 1.0
    assert score(verifier, reach("import os\nopen('x', 'w').write('x')\nreached = os.listdir() == ['x']"), host) == 1.0
    assert score(verifier, "def answer(n): return 2 * n + 1", host) == 0.0


@pytest.mark.parametrize("name", REACH)
def test_nothing_outside_is_reached(name: str, verifier: CodeVerifier, host: Host) -> None:
    assert score(verifier, reach(REACH[name]), host) == 0.0


@pytest.mark.skipif(not supported(), reason="no filter of system calls on this machine")
@pytest.mark.parametrize("name", KERNEL)
def test_the_kernel_refuses_what_no_program_needs(name: str, verifier: CodeVerifier, host: Host) -> None:
    assert score(verifier, reach(KERNEL[name]), host) == 0.0


@pytest.mark.parametrize("name", FORGE)
def test_no_pass_is_forged(name: str, verifier: CodeVerifier, host: Host) -> None:
    assert score(verifier, FORGE[name], host) == 0.0


@pytest.mark.parametrize("name", EXHAUST)
def test_what_uses_too_much_is_ended(name: str, verifier: CodeVerifier, host: Host) -> None:
    assert score(verifier, EXHAUST[name], host) == 0.0
