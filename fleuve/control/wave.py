"""Groups that are admitted together and whose requests all reach the workers before any is computed.

Floating-point sums depend on what else is in a batch. If the course of an engine is to be the same in every run, it
must not depend on when requests arrive: while the workers stand still, all of them come; then the workers take them up
in the order of their ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from fleuve.contracts import Sampler
from fleuve.control.fleet import Fleet
from fleuve.control.signal import Signal
from fleuve.types import Completion, GenerationRequest

PATIENCE = 10.0
"""Seconds for the requests of a wave to be made. A workflow that asks for fewer answers at first goes on then, in a
course that may not be the same in every run."""


class Waves:
    """Admits groups of `answers` answers to `fleet`."""

    def __init__(self, fleet: Fleet, answers: int) -> None:
        self._fleet = fleet
        self._answers = answers
        self._asked = 0
        self._signal = Signal()

    async def admit(self, start: Callable[[], int]) -> None:
        """`start()` starts groups and says how many."""
        await self._fleet.pause()
        try:
            self._asked = 0
            expected = start() * self._answers
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await self._signal.until(lambda: self._asked >= expected)
        finally:
            await self._fleet.resume()

    def sampler(self, inner: Sampler) -> Sampler:
        """`inner` for one group, its requests counted."""
        return _Counted(inner, self)

    def asked(self) -> None:
        """One more request has been made."""
        self._asked += 1
        self._signal.notify()


class _Counted:
    def __init__(self, inner: Sampler, waves: Waves) -> None:
        self._inner = inner
        self._waves = waves

    async def generate(self, request: GenerationRequest) -> Completion:
        self._waves.asked()
        return await self._inner.generate(request)
