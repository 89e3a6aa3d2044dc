"""Where the Ray cluster of a run is, and whether its head is there. Ray itself tries an address for many minutes."""

from __future__ import annotations

import os
import socket

from ray._private.services import canonicalize_bootstrap_address

from fleuve.config.launching import RaySettings, check_ray_address, split_ray_address
from fleuve.errors import UserError

SETTING = "launch.ray.address"
VARIABLE = "RAY_ADDRESS"
ALONE = f'{SETTING} = "local", a cluster of this machine alone'
ANSWER = 10.0
"""Seconds for the head to take a connection, and then to say the first word on it."""
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What every client of gRPC says first: the preface of HTTP/2 and empty settings (RFC 9113, 3.4 and 6.5)."""
HEADER = 9
"""Bytes before the content of an HTTP/2 frame; the fourth is its kind."""
SETTINGS = 4


class NoClusterError(UserError):
    """The cluster that was named cannot be had. `found` is what is wrong and where, `advice` what to do."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(f"{found}; {advice}")
        self.found = found
        self.advice = advice


def find_cluster(settings: RaySettings) -> bool:
    """Whether there is a cluster to join: its head answers. False where none is named, and none is here. It takes as
    long as the head may take to answer.

    Raises:
        NoClusterError: one is named, and its head does not answer.
    """
    name, given = named(settings)
    if given == "local":
        return False
    if given == "auto":
        try:
            address = canonicalize_bootstrap_address(given)
        except ConnectionError:
            return False
        return address is not None and silent(*split_ray_address(address)) is None
    try:
        check_ray_address(given)
    except ValueError as error:
        raise NoClusterError(f"{name}: {error}", f"give that, or take {ALONE}") from None
    # Ray takes this machine's own address in place of 127.0.0.1.
    host, port = split_ray_address(canonicalize_bootstrap_address(given) or given)
    if (why := silent(host, port)) is not None:
        raise NoClusterError(
            f"{name} = {given}: no Ray cluster has its head at {host}, port {port}: {why}",
            f"start one there (`ray start --head --port={port}`), or take {ALONE}",
        )
    return True


def named(settings: RaySettings) -> tuple[str, str]:
    """Who says where the cluster is, the setting or the environment, and what it says."""
    if settings.address == "auto" and (outside := os.environ.get(VARIABLE)):
        return VARIABLE, outside
    return SETTING, settings.address


def silent(host: str, port: int, answer: float = ANSWER) -> str | None:
    """Why no server of gRPC is there, which a head is; None if there is one. With Ray's TLS a connection is enough."""
    try:
        with socket.create_connection((host, port), timeout=answer) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return None
            connection.sendall(HELLO)
            said = b""
            while len(said) < HEADER and (more := connection.recv(HEADER - len(said))):
                said += more
    except TimeoutError:
        return f"no answer within {answer:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None if len(said) == HEADER and said[3] == SETTINGS else "what listens there is not Ray's"
