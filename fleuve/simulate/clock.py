"""An asyncio event loop on virtual time: sleeping costs nothing, the clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and advances only when every task waits. A deadlock is an error at once."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on virtual time.

    Raises:
        RuntimeError: every task waits and no timer is left.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
