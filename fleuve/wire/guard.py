"""Who may talk to a server: whoever knows its token; and without one, this machine's programs, but no web page.

A server listens on loopback unless it is told otherwise, and on any other address it must have a token. On loopback one
is optional for what is started by hand; a run gives each of its processes a token of its own (`launch.process`), since
other people may have accounts on the machine.

A browser is a program of this machine that does what foreign pages say. So whatever a page sends in another site's name
is refused, and so is, where there is no token, a request that was meant for another host name: a page could have
pointed its own name at this address.
"""

from __future__ import annotations

import ctypes
import hmac
import ipaddress
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from aiohttp import web

from fleuve.errors import UserError

TOKEN_VARIABLE = "FLEUVE_TOKEN"
"""Environment variable of a server and its clients: the token. `FLEUVE_TOKEN_FILE` names a file that holds it."""
SHORTEST = 16
"""Characters of a server's token: a shorter one can be guessed."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Refuse = Callable[[int, str], web.StreamResponse]


def take_token(sock: socket.socket, variable: str = TOKEN_VARIABLE) -> str | None:
    """The token of a server on the bound `sock`: None if it has none and needs none. It is taken out of this process's
    environment, so that nothing that is started from here has it, nor does whoever of this user looks into `/proc`.

    Raises:
        UserError: there is none, and others than this machine can reach `sock`; or it cannot be read or used, or is too
            short.
    """
    token = find_token(variable)
    for name in (variable, f"{variable}_FILE"):
        _wipe(name)
        os.environ.pop(name, None)
    host = sock.getsockname()[0]
    if token is not None and len(token) < SHORTEST:
        raise UserError(f"{variable}: a token of {len(token)} characters can be guessed: take {SHORTEST} or more")
    if token is None and not is_loopback(host):
        raise UserError(
            f"listening on {host} lets other machines in, which needs a token: set {variable}, or {variable}_FILE to a "
            "file that holds it; or listen on 127.0.0.1"
        )
    return token


def _wipe(name: str) -> None:
    """Overwrite a variable where it lies: removed, it would still be in what the kernel shows of this process's first
    environment."""
    getenv = ctypes.PyDLL(None).getenv
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_void_p
    if address := getenv(name.encode()):
        ctypes.memset(address, ord("*"), len(ctypes.string_at(address)))


def find_token(variable: str = TOKEN_VARIABLE) -> str | None:
    """The token that the environment gives, in `variable` or in the file that `variable`_FILE names.

    Raises:
        UserError: the file cannot be read or others may read it, or what is in there cannot be sent in a header.
    """
    token = os.environ.get(variable, "")
    if not token and (path := os.environ.get(f"{variable}_FILE")):
        token = _read_private(Path(path), f"{variable}_FILE")
    if not token:
        return None
    if not (token.isascii() and token.isprintable() and token == token.strip()):
        raise UserError(f"{variable}: a token is one line of ASCII letters, digits and signs, without blanks around it")
    return token


def bearer(token: str | None) -> dict[str, str]:
    """The header by which a client shows its token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def knows(token: str | None, request: web.Request) -> bool:
    """Whether `request` shows the token, or there is none to know. Takes as long for a token that is nearly right as
    for any other of its length."""
    given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
    return token is None or hmac.compare_digest(given, f"Bearer {token}".encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def guard(token: str | None, refuse: Refuse, open_to_all: Collection[str] = ("/health",)) -> Any:
    """The middleware that turns away who may not talk to this server. Put it before everything that reads a body.

    Args:
        refuse: makes the reply from its status, 401 or 403, and one line.
        open_to_all: paths that need no token. Their handlers find out by `knows` whom they tell what.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (why := _foreign(request)) or (token is None and (why := _misdirected(request))):
            return refuse(403, why)
        if request.path not in open_to_all and not knows(token, request):
            return refuse(401, "this server wants its token, as the header Authorization: Bearer TOKEN")
        return await handler(request)

    return guarded


def _foreign(request: web.Request) -> str:
    """Why this is the request of another site's page; empty if it is not. Only browsers send these headers."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        return f"a page of {origin!r} may not use this server"
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return "another site's page may not use this server"
    return ""


def _misdirected(request: web.Request) -> str:
    host = request.headers.get("Host")
    if host is None or is_loopback(_name(host)):
        return ""
    return f"this server listens on this machine only and is not {host!r}; call it 127.0.0.1 or localhost"


def _name(host: str) -> str:
    """`127.0.0.1:8000` without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _read_private(path: Path, setting: str) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            if (mode := stat.S_IMODE(os.fstat(file.fileno()).st_mode)) & 0o077:
                raise UserError(f"{setting} = {path}: others may read it (mode {mode:04o}): chmod 600 {path}")
            token = file.read().strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{setting} = {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not token:
        raise UserError(f"{setting} = {path}: holds no token")
    return token
