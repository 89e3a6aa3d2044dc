"""An asyncio event loop on virtual time: sleeping costs nothing, the clock jumps to the next timer.

With a seed, timers that are due at the same instant go off in an order drawn from it, as they might anywhere: what must
hold then holds of every order, and the same seed gives the same one again. Without, in the order they were set.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SAME_INSTANT = 1e-9
"""Timers less than so many seconds apart go off together: sums of times that should be equal may not be."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """`time()` starts at 0 and advances only when every task waits. A deadlock is an error at once.

    There are no sockets and no files on it, so a round is short: asyncio's own looks at those in each, and compares
    timers in Python.
    """

    _ready: deque[asyncio.Handle]  # asyncio's: what `call_soon` was given

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, float, asyncio.TimerHandle]] = []  # a heap: when, rank, what
        self._set = 0
        self._draw = None if seed is None else random.Random(seed).random

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As any loop's, with the order among equals decided here; `call_later` and `sleep` come this way too."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._set += 1
        heapq.heappush(self._timers, (when, self._set if self._draw is None else self._draw(), timer))
        return timer

    def _run_once(self) -> None:
        """One round: if nothing is ready the clock goes on to the next timer; then all that is ready runs."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready:
            if not timers:
                # On real time this would wait for ever.
                raise RuntimeError("deadlock: every task waits and no timer is left")
            self._now += max(timers[0][0] - self._now, 0.0)
        while timers and timers[0][0] < self._now + SAME_INSTANT:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _write_to_self(self) -> None:
        """Wakes a loop that waits for sockets: this one never does."""


def run_virtual(main: Coroutine[Any, Any, T], seed: int | None = None) -> T:
    """Run `main` to its end on virtual time; `seed` orders what happens at the same instant.

    Raises:
        RuntimeError: every task waits and no timer is left.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(main)
