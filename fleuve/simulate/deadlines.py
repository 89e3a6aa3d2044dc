"""How long callers of a simulated engine wait: the deadlines of the real client, without a timer for each call."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from typing import Any

from fleuve.contracts import RolloutError


class Deadlines:
    """Calls that are waited for; what comes too late is a RolloutError, as with the real client.

    An engine that looks at its calls again before the first deadline needs no timer for it. There is one only where
    it is going to be busy, or idle, beyond that: see `watch`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # By how long they are waited for: of those in one table, the first is the first to be given up.
        self._calls: dict[float, dict[asyncio.Future[Any], tuple[float, str, str]]] = defaultdict(dict)
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, reply: asyncio.Future[Any], limit: float, key: str, what: str) -> None:
        """From now on `reply` is waited for, for `limit` seconds by the setting `key`; errors call it `what`."""
        end = asyncio.get_running_loop().time() + limit
        self._calls[limit][reply] = (end, what, key)
        if self._timer is None and end < self._until:
            self._set(end)

    def end(self, reply: asyncio.Future[Any], limit: float) -> None:
        """It is not waited for any more."""
        self._calls[limit].pop(reply, None)

    def watch(self, until: float) -> None:
        """The engine looks again at `until`: a deadline before that needs a timer."""
        self._until = until
        first = min((next(iter(calls.values()))[0] for calls in self._calls.values() if calls), default=math.inf)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if first < until:
            self._set(first)

    def _set(self, when: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(when, self._ring, when)

    def _ring(self, now: float) -> None:
        for limit, calls in self._calls.items():
            for reply, (_, what, key) in [item for item in calls.items() if item[1][0] <= now]:
                del calls[reply]
                if not reply.done():
                    reply.set_exception(RolloutError(f"{self._name}: no answer to {what} within {limit:g} s ({key})"))
        self.watch(self._until)
