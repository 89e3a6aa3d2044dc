"""A bounded room with one door: so many at a time, of so many bytes together; the others wait outside, in order."""

from __future__ import annotations

import asyncio
from collections import deque


class Door:
    """`enter` and `leave`, by whoever brings `size` bytes. What is larger than all of the room gets it alone."""

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._size = size
        self.inside = 0
        self.bytes = 0
        self._outside: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def outside(self) -> int:
        """Who waits for room."""
        return sum(not future.done() for _, future in self._outside)

    async def enter(self, size: int, until: float) -> bool:
        """Wait for room; False if there is none by the loop's time `until`. Who is let in has to `leave`."""
        if not self._outside and self._fits(size):
            self._admit(size)
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._outside.append(entry)
        try:
            async with asyncio.timeout_at(until):
                await turn
        except TimeoutError:
            self._give_up(entry)
            return False
        except BaseException:
            self._give_up(entry)
            raise
        return True

    def leave(self, size: int) -> None:
        """Make room for the next."""
        self.inside -= 1
        self.bytes -= size
        self._call_in()

    def _fits(self, size: int) -> bool:
        return self.inside == 0 or (self.inside < self._count and self.bytes + size <= self._size)

    def _admit(self, size: int) -> None:
        self.inside += 1
        self.bytes += size

    def _give_up(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        size, turn = entry
        if turn.done() and not turn.cancelled():  # let in at the same moment
            self.leave(size)
            return
        if entry in self._outside:
            self._outside.remove(entry)
        self._call_in()  # it may have been all that held the others up

    def _call_in(self) -> None:
        while self._outside:
            size, turn = self._outside[0]
            if not turn.cancelled():
                if not self._fits(size):
                    return
                self._admit(size)
                turn.set_result(None)
            self._outside.popleft()
