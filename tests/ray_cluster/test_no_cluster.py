"""Where there is no cluster, or Ray does not start one, that is one line, soon."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from ray_runs import CONFIG, QUIET, ROOT, cluster, running

from fleuve.config.launching import RaySettings
from fleuve.launch.ray_address import ANSWER, NoClusterError, find_cluster, silent

pytestmark = pytest.mark.ray

WITHOUT_RAYLET = (
    "from ray._private import services; services.RAYLET_EXECUTABLE = '/bin/false'; "
    "from fleuve.__main__ import main; main()"
)
"""The command, on a machine where Ray's process of a node does not come up."""


@pytest.fixture
def nobody() -> str:
    """An address of this machine where nothing listens."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    return f"127.0.0.1:{port}"


@contextmanager
def head(nodes: object, number: int) -> Iterator[None]:
    """The head's process has got a signal, for so long."""
    (started,) = nodes.head_node.all_processes["gcs_server"]
    started.process.send_signal(number)
    yield
    started.process.send_signal(signal.SIGCONT)


def fleuve(directory: Path, *words: str, program: tuple[str, ...] = ("-m", "fleuve"), **environment: str):
    """The command as it ends, within a minute, where no cluster has to come up."""
    (directory / "config.toml").write_text(CONFIG.format(steps=1))
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, *program, *words],
        cwd=directory,
        env={**env, **QUIET, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def test_who_is_no_head_is_told_from_one_that_is(nobody):
    assert silent("127.0.0.1", int(nobody.rpartition(":")[2])) == "Connection refused"
    assert silent("nowhere.invalid", 6379) is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert silent("127.0.0.1", server.getsockname()[1], answer=0.5) == "no answer within 0.5 s"
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert silent("127.0.0.1", server.server_port) == "what listens there is not Ray's"
        server.shutdown()
    with cluster(cpus=1) as nodes:
        host, _, port = nodes.address.rpartition(":")
        assert silent(host, int(port)) is None
        assert find_cluster(RaySettings(address=nodes.address))
        with head(nodes, signal.SIGSTOP):
            assert silent(host, int(port), answer=1.0) == "no answer within 1 s"


def test_what_the_environment_names_is_named_as_its_own(monkeypatch, nobody):
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    with pytest.raises(NoClusterError, match=rf"^RAY_ADDRESS = {nobody}: .*Connection refused; .*ray start --head"):
        find_cluster(RaySettings())
    assert not find_cluster(RaySettings(address="local"))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert not find_cluster(RaySettings())
    monkeypatch.setenv("RAY_ADDRESS", "head")
    with pytest.raises(NoClusterError, match=r"^RAY_ADDRESS: 'head' is neither .* nor HOST:PORT"):
        find_cluster(RaySettings())


def test_a_run_at_an_address_without_a_head_ends_at_once_with_a_line(tmp_path, nobody):
    began = time.monotonic()
    done = fleuve(tmp_path, "train", "config.toml", "--launch.ray.address", nobody)
    assert done.returncode == 2, done.stderr
    (line,) = errors(done)
    assert line.startswith(f"error: launch.ray.address = {nobody}: no Ray cluster has its head at ")
    assert "Connection refused; start one there (`ray start --head --port=" in line
    assert '"local"' in line
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 60


def test_a_run_that_waits_for_a_head_ends_at_once_when_it_is_told_to(tmp_path):
    with socket.create_server(("", 0)) as server:
        server.settimeout(60)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with running(tmp_path, address) as run, server.accept()[0]:
            began = time.monotonic()
            run.process.send_signal(signal.SIGTERM)
            assert run.process.wait(timeout=30) == 130, run.output
            assert time.monotonic() - began < ANSWER
        assert "error" not in run.output


def test_doctor_says_the_same_in_a_row_that_failed(tmp_path, nobody):
    done = fleuve(tmp_path, "doctor", "--json", "config.toml", RAY_ADDRESS=nobody)
    assert done.returncode == 1, done.stderr
    (row,) = [row for row in json.loads(done.stdout) if row["check"] == "Ray cluster"]
    assert row["verdict"] == "fail"
    assert row["found"].startswith(f"RAY_ADDRESS = {nobody}: no Ray cluster has its head at ")
    assert "ray start --head" in row["advice"]


def test_a_place_of_which_ray_can_make_nothing_is_a_line(tmp_path):
    far = tmp_path / ("far" * 30)
    far.mkdir()
    done = fleuve(tmp_path, "train", "config.toml", "--launch.ray.address", "local", RAY_TMPDIR=str(far))
    assert done.returncode == 2, done.stderr
    (line,) = errors(done)
    assert "Ray does not start a cluster on this machine: " in line
    assert "AF_UNIX path length cannot exceed" in line
    assert "Traceback" not in done.stderr


def test_a_node_that_does_not_come_up_is_a_line_that_says_where_the_logs_are(tmp_path):
    words = ("train", "config.toml", "--launch.ray.address", "local")
    done = fleuve(tmp_path, *words, program=("-c", WITHOUT_RAYLET))
    assert done.returncode == 2, done.stderr
    (line,) = errors(done)
    assert "Ray does not start a cluster on this machine: The current node timed out during startup" in line
    assert "/ray/session_latest/logs say more" in line
    assert "Traceback" not in done.stderr
