"""An asyncio event loop on virtual time: sleeping costs nothing, the clock jumps to the next timer.

With a seed, timers that are due at the same instant go off in an order drawn from it, as they might anywhere: what must
hold then holds of every order, and the same seed gives the same one again. Without, in the order they were set.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Jump(selectors.BaseSelector):
    """Instead of waiting for sockets, moves the clock on by as long as the loop would have waited."""

    def __init__(self) -> None:
        self._inner = selectors.DefaultSelector()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            # No timer is left and nothing is ready: on real time this would wait for ever.
            raise RuntimeError("deadlock: every task waits and no timer is left")
        self.now += max(timeout, 0.0)
        return self._inner.select(0)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Any:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class _Moment(float):
    """A time of the clock; two that are equal are ordered by `rank`. The loop's own heap of timers compares these."""

    __slots__ = ("rank",)
    rank: float

    def __lt__(self, other: float, /) -> bool:
        if float.__eq__(self, other) and isinstance(other, _Moment):
            return self.rank < other.rank
        return float.__lt__(self, other)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and advances only when every task waits. A deadlock is an error at once."""

    def __init__(self, seed: int | None = None) -> None:
        self._jump = _Jump()
        self._set = 0
        self._draw = None if seed is None else random.Random(seed).random
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As any loop's, with the order among equals decided here; `call_later` and `sleep` come this way too."""
        moment = _Moment(when)
        self._set += 1
        moment.rank = self._set if self._draw is None else self._draw()
        return super().call_at(moment, callback, *args, context=context)


def run_virtual(main: Coroutine[Any, Any, T], seed: int | None = None) -> T:
    """Run `main` to its end on virtual time; `seed` orders what happens at the same instant.

    Raises:
        RuntimeError: every task waits and no timer is left.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(main)
