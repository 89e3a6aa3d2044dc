"""The rollout workers as one: routes groups to them, and brings all of them to a new policy version."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fleuve.contracts import RolloutEngine
from fleuve.control.router import Router
from fleuve.types import Interrupt, WeightFile


class Fleet:
    """`served_version` is the oldest version that any worker may still sample with."""

    def __init__(self, engines: Sequence[RolloutEngine], seed: int, version: int = 0) -> None:
        self._engines = engines
        self._versions = [version] * len(engines)
        self._router = Router(len(engines), seed)

    @property
    def served_version(self) -> int:
        """After an update this is its version; during one, still the version before."""
        return min(self._versions)

    @asynccontextmanager
    async def worker(self, answers: int) -> AsyncIterator[RolloutEngine]:
        """The engine for one group of `answers`, for as long as they are in flight."""
        index = self._router.take(answers)
        try:
            yield self._engines[index]
        finally:
            self._router.give_back(index, answers)

    async def update(self, weights: WeightFile, interrupt: Interrupt) -> int:
        """Bring every worker to `weights`; how many answers were interrupted.

        Raises:
            RolloutError: a worker refused, failed, or did not answer in time.
        """
        async with asyncio.TaskGroup() as tasks:
            updates = [tasks.create_task(e.update_weights(weights, interrupt)) for e in self._engines]
        self._versions = [weights.version] * len(self._engines)
        return sum(u.result().interrupted for u in updates)

    async def pause(self) -> None:
        """No worker computes until `resume`; answers in flight stay where they are."""
        await asyncio.gather(*(e.pause() for e in self._engines))

    async def resume(self) -> None:
        """The workers go on."""
        await asyncio.gather(*(e.resume() for e in self._engines))

    async def metrics(self) -> dict[str, float]:
        """The workers' counters, added up."""
        total: Counter[str] = Counter()
        for metrics in await asyncio.gather(*(e.metrics() for e in self._engines)):
            total.update(metrics)
        return dict(total)
