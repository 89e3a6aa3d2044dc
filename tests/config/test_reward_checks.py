"""What can be known to be wrong with the rewards before anything starts, each in one line."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from checked import Make, notes, problems

from fleuve.config.preflight import preflight

WEAK = {"code": {"sandbox": "limits", "allow_weak_sandbox": True}}


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps({"prompt": "1?", "answer": "1"} | row) + "\n" for row in rows))


def test_verifiers_that_rows_name_are_looked_for(
    make: Make, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(text, answer, row): return 1.0\n")
    write(rows, {}, {"verifier": "mine:score"}, {"verifier": "math + 0.5*mine:scor"}, {"verifier": "yours:score"})
    assert problems(make()) == [
        "rows.jsonl:3: verifier = mine:scor: mine.py has no function 'scor'; did you mean 'score'?",
        "rows.jsonl:4: verifier = yours:score: no module 'yours' in the current directory, nor installed",
    ]


def test_rows_of_the_evaluation_are_looked_at_too(make: Make, tmp_path: Path) -> None:
    write(tmp_path / "held_out.jsonl", {"verifier": "no_such:f"})
    (line,) = problems(make(data={"eval": str(tmp_path / "held_out.jsonl")}))
    assert line.startswith("held_out.jsonl:1: verifier = no_such:f: no module 'no_such'")


def test_the_weakest_walls_have_to_be_allowed_where_only_a_row_names_code(make: Make, rows: Path) -> None:
    write(rows, {}, {"verifier": "code", "tests": ["assert f(1) == 1"]})
    (line,) = problems(make(reward={"code": {"sandbox": "limits"}}))
    assert "allow that with reward.code.allow_weak_sandbox = true" in line
    lines = preflight(make(reward=WEAK))
    assert "ok: sandbox for programs: limits" in "\n".join(lines)
    write(rows, {})
    assert "sandbox" not in "\n".join(preflight(make(reward=WEAK)))


def test_a_time_limit_needs_its_deadline(make: Make, rows: Path) -> None:
    slow = {"verifier": "code", "tests": ["assert f(1) == 1"], "time_limit": 10}
    write(rows, slow | {"time_limit": 3}, slow)
    assert problems(make(reward=WEAK)) == [
        "rows.jsonl:2: time_limit = 10 s needs reward.deadline = 11.8 or more, not 5"
    ]
    preflight(make(reward=WEAK | {"deadline": 11.8}))


@pytest.mark.parametrize(("key", "value"), [("seconds", 10), ("cpu_seconds", 100)])
def test_a_program_s_own_time_needs_its_deadline(make: Make, rows: Path, key: str, value: float) -> None:
    reward = {"code": WEAK["code"] | {key: value}}
    assert preflight(make(reward=reward))  # no program is run
    write(rows, {"verifier": "code", "tests": ["assert f(1) == 1"]})
    (line,) = problems(make(reward=reward))
    needed = {10: 11.8, 100: 117.7}[value]
    assert line == (
        f"reward.code.{key} = {value} needs reward.deadline = {needed} or more, not 5; "
        "with that, it may be 4.25 at most"
    )
    assert preflight(make(reward=reward | {"deadline": needed}))
    assert preflight(make(reward={"code": WEAK["code"] | {key: 4.25}}))


def test_the_defaults_do_not_fit_a_shorter_deadline(make: Make, rows: Path) -> None:
    write(rows, {"verifier": "code", "tests": ["assert f(1) == 1"]})
    (line,) = problems(make(reward=WEAK | {"deadline": 3.0}))
    assert line.startswith(
        "reward.code.seconds = 4 needs reward.deadline = 4.8 or more, not 3; with that, it may be 2.55"
    )


def test_where_verifiers_are_to_be_imported_from_there_is_a_directory(make: Make, rows: Path) -> None:
    missing = str(rows.parent / "missing")
    write(rows, {"verifier": "mine:score"})
    for path in (missing, str(rows)):
        assert problems(make(reward={"path": path})) == [f"reward.path = {Path(path).name}: no such directory"]


class Service(BaseHTTPRequestHandler):
    """Answers as the test says."""

    status, body = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def serve(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes) -> None:
    monkeypatch.setattr(Service, "status", status)
    monkeypatch.setattr(Service, "body", body)


def test_a_service_that_answers_is_asked_for_its_verifiers(
    make: Make, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, 200, b'{"verifiers": ["math", "far:away"], "workers": 7, "deadline": 5.0}')
    lines = preflight(make(reward={"url": url}, data={"verifier": "math + far:away"}))
    assert f"ok: answers are scored by the 7 processes of the reward service at {url}" in lines
    (line,) = problems(make(reward={"url": url}, data={"verifier": "math + far:off"}))
    assert line == (
        f"reward.url = {url}: the service has no verifier 'far:off', only math, far:away; start it with "
        "--verifier far:off"
    )


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b"the service wants another token", "the service wants another token"),
        (404, b"", "HTTP 404"),
        (200, b"<html>", "what answers there is no reward service"),
    ],
)
def test_what_waiting_would_not_mend_is_an_error(
    make: Make, url: str, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, message: str
) -> None:
    serve(monkeypatch, status, body)
    assert problems(make(reward={"url": url})) == [f"reward.url = {url}: {message}"]


def test_a_service_that_does_not_answer_yet_is_a_note(make: Make, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, 503, b"no verifier process can be started")
    (note,) = notes(make(reward={"url": url}))
    assert note.startswith(f"reward.url = {url}: no reward service answers there now (no verifier process can be")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        nobody = f"http://127.0.0.1:{sock.getsockname()[1]}"
    (note,) = notes(make(reward={"url": nobody, "start_timeout": 7}))
    assert "Connection refused); a run waits for it for reward.start_timeout = 7 s" in note


def test_a_service_that_hangs_is_not_waited_for_long(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleuve.rewards.probe.SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (note,) = notes(make(reward={"url": f"http://127.0.0.1:{silent.getsockname()[1]}"}))
    assert "(timed out)" in note


def test_a_port_that_is_none_is_an_error(make: Make) -> None:
    (line,) = problems(make(reward={"url": "http://verifiers.local:81OO"}))
    assert line.startswith("reward.url = http://verifiers.local:81OO: ")
