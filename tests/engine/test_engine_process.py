"""The engine as a process of its own: how it starts, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from served import MSGPACK
from tiny_engine import ask, prompt_of, tiny_model

from fleuve.engine.options import EngineOptions
from fleuve.engine.service import open_engine
from fleuve.errors import UserError
from fleuve.types import encode
from fleuve.wire.listen import bind


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


def test_a_model_directory_without_tokenizer_or_without_model_is_one_clear_line(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="has no tokenizer"):
        open_engine(EngineOptions(model=str(tmp_path / "bare")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot open the model") as caught:
        open_engine(EngineOptions(model=str(tmp_path / "empty")))
    assert "\n" not in str(caught.value)


def test_on_the_socket_it_was_given_it_serves_and_ends_within_a_second_of_sigterm_with_connections_open(
    model_dir: Path,
) -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "fleuve.engine", json.dumps({"model": str(model_dir), "version": 7, "name": "w0"})],
            pass_fds=[sock.fileno()],
            env=os.environ | {"FLEUVE_SOCKET_FD": str(sock.fileno())},
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        idle, asking = (http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(2))
        idle.request("GET", "/health")  # waits in the backlog until it serves, and is kept alive
        health = json.loads(idle.getresponse().read())
        assert health == {"status": "ok", "name": "w0", "model": str(model_dir), "version": 7}
        asking.request("POST", "/pause")
        assert asking.getresponse().read()
        asking.request("POST", "/generate", encode(ask("a", prompt_of(0, 9))), MSGPACK)
        time.sleep(0.2)
        told = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - told < 1.0
        assert process.communicate()[0].startswith("w0: serving")
    finally:
        process.kill()


def test_as_a_process_it_refuses_unknown_options_with_exit_code_2() -> None:
    command = [sys.executable, "-m", "fleuve.engine", '{"model": "x", "treads": 1}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "treads" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
