"""Where a server that is started by hand listens."""

from __future__ import annotations

import errno
import socket

from fleuve.errors import UserError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        UserError: the port is in use, or the address cannot be bound.
    """
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is in use by another process: choose another with --port"
            ) from error
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
