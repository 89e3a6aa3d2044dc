"""How an engine's process comes to serve: whether it may listen where it should is found out before torch is imported,
which takes seconds."""

from __future__ import annotations

import socket
from typing import NoReturn

from fleuve.ending import leave_after_running
from fleuve.engine.options import EngineOptions
from fleuve.wire.guard import take_token
from fleuve.wire.listen import bind


def serve(options: EngineOptions, host: str, port: int) -> NoReturn:
    """Serve a model until interrupted, and end this process with that.

    Raises:
        UserError: the port is in use, or there is no token and other machines can reach it. (A model that cannot be
            opened ends the process with one line, too.)
    """
    with bind(host, port) as sock:
        serve_on(options, sock)


def serve_on(options: EngineOptions, sock: socket.socket) -> NoReturn:
    """As `serve`, on a bound socket."""
    token = take_token(sock)
    from fleuve.engine.server import run

    leave_after_running(run(options, sock, token))
