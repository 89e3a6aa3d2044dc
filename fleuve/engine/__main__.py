"""An engine process: `python -m fleuve.engine '{"model": ...}'`, on the socket that its parent passed on.

Started by hand, without a parent's socket, it serves on 127.0.0.1:8000.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from fleuve.engine.options import EngineOptions
from fleuve.errors import UserError
from fleuve.launch import child


def main() -> None:
    child.adopt()
    try:
        if len(sys.argv) != 2:
            raise UserError('give the engine\'s options as one JSON argument, such as \'{"model": "PATH"}\'')
        options = _options(sys.argv[1])
        from fleuve.engine import server  # after adopt: importing torch takes seconds

        if child.has_listening_socket():
            asyncio.run(server.run(options, child.listening_socket()))
        else:
            server.serve(options, "127.0.0.1", 8000)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _options(text: str) -> EngineOptions:
    try:
        return msgspec.json.decode(text, type=EngineOptions)
    except msgspec.DecodeError as error:
        raise UserError(f"engine options: {error}") from error


if __name__ == "__main__":
    main()
