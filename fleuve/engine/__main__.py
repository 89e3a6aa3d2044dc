"""An engine process: `python -m fleuve.engine '{"model": ...}'`, on the socket that its parent passed on.

Started by hand, without a parent's socket, it serves on 127.0.0.1:8000.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import msgspec

from fleuve.ending import leave_after
from fleuve.engine.options import EngineOptions
from fleuve.engine.serving import serve, serve_on
from fleuve.errors import UserError
from fleuve.launch import child


def main() -> NoReturn:
    child.adopt()
    leave_after(_serve)


def _serve() -> None:
    if len(sys.argv) != 2:
        raise UserError('give the engine\'s options as one JSON argument, such as \'{"model": "PATH"}\'')
    options = _options(sys.argv[1])
    if child.has_listening_socket():
        serve_on(options, child.listening_socket())
    serve(options, "127.0.0.1", 8000)


def _options(text: str) -> EngineOptions:
    try:
        return msgspec.json.decode(text, type=EngineOptions)
    except msgspec.DecodeError as error:
        raise UserError(f"engine options: {error}") from error


if __name__ == "__main__":
    main()
