"""An engine process: `python -m fleuve.engine '{"model": ...}'`, on the socket that its parent passed on.

Started by hand, without a parent's socket, it serves on 127.0.0.1:8000.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import msgspec

from fleuve.ending import leave_after, leave_after_running
from fleuve.engine.options import EngineOptions
from fleuve.engine.standalone import serve
from fleuve.errors import UserError
from fleuve.launch import child
from fleuve.wire.guard import take_token


def main() -> NoReturn:
    child.adopt()
    leave_after(_serve)


def _serve() -> None:
    if len(sys.argv) != 2:
        raise UserError('give the engine\'s options as one JSON argument, such as \'{"model": "PATH"}\'')
    options = _options(sys.argv[1])
    if not child.has_listening_socket():
        serve(options, "127.0.0.1", 8000)
    sock = child.listening_socket()
    token = take_token(sock)
    from fleuve.engine.server import run  # after adopt: importing torch takes seconds

    leave_after_running(run(options, sock, token))


def _options(text: str) -> EngineOptions:
    try:
        return msgspec.json.decode(text, type=EngineOptions)
    except msgspec.DecodeError as error:
        raise UserError(f"engine options: {error}") from error


if __name__ == "__main__":
    main()
