"""Waiting for a condition on shared state without locks: who changes it notifies, who waits looks again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes every waiter at each `notify`, in the order they came; a waiter goes on once its own condition holds."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # a set's order would depend on addresses

    def notify(self) -> None:
        """The state changed."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as `condition()` holds; it is evaluated now and after each `notify`."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                self._waiters.pop(waiter, None)
