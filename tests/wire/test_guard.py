"""Who may talk to a server, and which files it may be asked for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from fleuve.errors import UserError
from fleuve.wire.confine import OutsideError, confined
from fleuve.wire.guard import bearer, find_token, guard, is_loopback, take_token
from fleuve.wire.listen import bind

VARIABLE = "FLEUVE_TEST_TOKEN"


def refuse(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=why)


@asynccontextmanager
async def served(token: str | None) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"read {len(await request.read())}")

    app = web.Application(middlewares=[guard(token, refuse)])
    app.add_routes([web.get("/health", answer), web.post("/work", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    with bind("127.0.0.1", 0) as sock:
        await web.SockSite(runner, sock).start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as session:
            yield session, f"127.0.0.1:{sock.getsockname()[1]}"
        await runner.cleanup()


async def status(session: aiohttp.ClientSession, path: str = "/work", **headers: str) -> int:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with session.request("GET" if path == "/health" else "POST", path, headers=names) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer secre",
        "Bearer secrets",
        "bearer secret",
        "secret",
        "Basic secret",
        "Bearer \xe9",
    ],
)
async def test_whoever_does_not_show_the_whole_token_is_turned_away(shown: str) -> None:
    async with served("secret") as (session, _):
        assert await status(session, Authorization=shown) == 401
        assert await status(session, **bearer("secret")) == 200


async def test_health_is_open_and_nothing_else_is_found_out_without_the_token() -> None:
    async with served("secret") as (session, _):
        assert await status(session, "/health") == 200
        assert await status(session, "/nothing/here") == 401
        assert await status(session, "/health/../work") == 401


async def test_without_a_token_this_machine_s_programs_are_let_in() -> None:
    async with served(None) as (session, _):
        assert await status(session) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://[broken"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
@pytest.mark.parametrize("token", [None, "secret"])
async def test_what_a_foreign_page_has_a_browser_send_is_refused_with_or_without_the_token(token, headers) -> None:
    async with served(token) as (session, host):
        assert await status(session, **headers, **bearer(token)) == 403
        assert await status(session, "/health", **headers, **bearer(token)) == 403
        own = {"Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"}
        assert await status(session, **own, **bearer(token)) == 200


async def test_a_name_that_a_page_pointed_at_this_machine_is_not_this_server() -> None:
    async with served(None) as (session, _):
        for name in ("elsewhere.example", "elsewhere.example:8000", "127.0.0.1.elsewhere.example", "10.0.0.1", "[", ""):
            assert await status(session, Host=name) == 403
        for name in ("localhost", "localhost:8000", "127.0.0.1", "127.0.0.2:80", "[::1]:80"):
            assert await status(session, Host=name) == 200
    async with served("secret") as (session, _):  # who knows the token is no page
        assert await status(session, Host="machine.example:8000", **bearer("secret")) == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_needs_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        with pytest.raises(UserError, match=f"listening on {host} .* needs a token: set {VARIABLE}") as caught:
            take_token(sock, VARIABLE)
        assert "\n" not in str(caught.value)
        monkeypatch.setenv(VARIABLE, "")
        with pytest.raises(UserError, match="needs a token"):
            take_token(sock, VARIABLE)
        monkeypatch.setenv(VARIABLE, "a-secret-of-this-test")
        assert take_token(sock, VARIABLE) == "a-secret-of-this-test"
    assert VARIABLE not in os.environ  # whatever is started from here does not have it


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
@pytest.mark.parametrize(
    "token", [" ", "\t", " " * 20, "a" * 15, " " + "a" * 20, "a" * 20 + "\n", "é" * 20, "a\rb" * 9]
)
def test_a_token_that_can_be_guessed_or_not_be_sent_is_none(
    token: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, token)
    with socket.create_server((host, 0)) as sock, pytest.raises(UserError, match=f"{VARIABLE}: a token .*") as caught:
        take_token(sock, VARIABLE)
    assert "\n" not in str(caught.value)


def test_a_token_that_was_taken_is_nowhere_in_the_process_s_environment() -> None:
    script = (
        "import os, socket\nfrom fleuve.wire.guard import take_token\n"
        "with socket.create_server(('127.0.0.1', 0)) as sock:\n  print(take_token(sock))\n"
        "if os.path.exists('/proc/self/environ'): print(open('/proc/self/environ').read())\n"
        "print(os.environ.get('OTHER'), os.environ.get('FLEUVE_TOKEN'))"
    )
    env = os.environ | {"FLEUVE_TOKEN": "secret-of-this-test", "OTHER": "stays"}
    words = [sys.executable, "-c", script]
    told = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.startswith("secret-of-this-test\n")
    assert told.count("secret-of-this-test") == 1
    assert told.endswith("stays None\n")


def test_only_addresses_of_this_machine_are_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org"]))


def test_a_token_file_is_its_owner_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv(f"{VARIABLE}_FILE", str(file))
    with pytest.raises(UserError, match=f"{VARIABLE}_FILE = {file}: cannot be read: No such file"):
        find_token(VARIABLE)
    file.write_text("secret\n")
    for mode in (0o644, 0o640, 0o602):
        file.chmod(mode)
        with pytest.raises(UserError, match=f"others may read it .*: chmod 600 {file}"):
            find_token(VARIABLE)
    file.chmod(0o600)
    assert find_token(VARIABLE) == "secret"
    file.write_text("\n")
    with pytest.raises(UserError, match="holds no token"):
        find_token(VARIABLE)
    file.write_text("two\nlines")
    with pytest.raises(UserError, match="one line of ASCII"):
        find_token(VARIABLE)


def test_files_are_those_in_the_directories_named_at_the_start(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "run-other"
    run.mkdir()
    other.mkdir()
    (run / "link").symlink_to(other)
    (run / "inside").symlink_to(run / "real")
    (run / "circle").symlink_to(run / "circle")
    assert confined(f"{run}/a/../b", [run]) == run / "b"
    assert confined(f"{run}/inside/x", [run]) == run / "real" / "x"
    assert confined(f"{other}/x", [run, other]) == other / "x"
    refused = ["", "x", "run/x", str(run), f"{run}/", f"{run}/..", f"{run}/../run-other/x", f"{other}/x", "/etc/passwd"]
    refused += [f"{run}/link/x", f"{run}/link", f"{run}/\0", f"{run}/circle/x", "/proc/self/root/etc"]
    for path in refused:
        with pytest.raises(OutsideError) as caught:
            confined(path, [run])
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000
    with pytest.raises(OutsideError, match="no directory: none was named"):
        confined(f"{run}/x", [])


@given(st.lists(st.sampled_from(["..", ".", "a", "link", "", "run", "run-other", "x y"]), max_size=8))
def test_no_spelling_leads_outside(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    root = tmp_path_factory.getbasetemp() / "spelling"
    (root / "run").mkdir(parents=True, exist_ok=True)
    if not (root / "run" / "link").is_symlink():
        (root / "run" / "link").symlink_to(root)
    path = os.sep.join([str(root / "run"), *parts])
    inside = os.path.realpath(path).startswith(f"{root.resolve()}/run/")
    try:
        assert str(confined(path, [root / "run"])) == os.path.realpath(path)
    except OutsideError:
        assert not inside
    else:
        assert inside


def test_a_port_in_use_is_one_clear_line() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
