"""The head of a Ray cluster: whether it is there.

Ray ends every process of a cluster, with no word to it, that has not reached the head for a minute
(`RAY_gcs_rpc_server_reconnect_timeout_s`). Nothing can be started in the meantime. A run ends by itself before that,
and says why; its own process is given longer by Ray, to end in order.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from fleuve.launch.background import in_background
from fleuve.launch.host import HostLostError

_WAITS = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_WAITS = float(os.environ.get(_WAITS) or 60.0)
"""Seconds for which Ray lets a process go on that does not reach the head; more where a cluster's head is brought
back."""
PATIENCE = RAY_WAITS / 2
"""Seconds for which a run waits for the head."""
TO_END = 240.0
"""Seconds more than the others that this process has."""
LOOK_EVERY = 2.0
"""Seconds between two looks."""
ANSWER = 5.0
"""Seconds for an answer."""


@contextmanager
def time_to_end() -> Iterator[None]:
    """Join a cluster in here, and Ray lets this process go on for longer than the others."""
    former = os.environ.get(_WAITS)
    os.environ[_WAITS] = str(int(RAY_WAITS + TO_END))
    try:
        yield
    finally:  # what this process starts is none of it
        del os.environ[_WAITS]
        if former is not None:
            os.environ[_WAITS] = former


async def watch_head() -> None:
    """Ask the head again and again whether it is there. Never returns.

    Raises:
        HostLostError: it has not answered for `PATIENCE` seconds.
    """
    loop = asyncio.get_running_loop()
    address = ray.get_runtime_context().gcs_address
    client: Any = None

    def ask() -> None:
        nonlocal client
        client = client or ray._raylet.GcsClient(address=address)
        client.check_alive([], timeout=ANSWER)

    silent_since: float | None = None
    while True:
        try:
            async with asyncio.timeout(2 * ANSWER):
                await in_background(ask)
            silent_since = None
        except (ray.exceptions.RpcError, TimeoutError):
            silent_since = loop.time() if silent_since is None else silent_since
            if loop.time() - silent_since >= PATIENCE:
                raise HostLostError(
                    f"the head of the Ray cluster at {address} has not answered for {PATIENCE:g} s, and without it no "
                    "process can be started: bring a cluster up, and start the run again"
                ) from None
        await asyncio.sleep(LOOK_EVERY)
