"""A rollout worker to whose machine weights are brought before it is told to read them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from fleuve.contracts import ContinuingEngine, RolloutEngine
from fleuve.types import Completion, GenerationRequest, Interrupt, Progress, WeightFile, WeightUpdate

Deliver = Callable[[WeightFile], Awaitable[None]]


class DeliveringEngine:
    """Implements `contracts.RolloutEngine` by `engine`."""

    def __init__(self, engine: RolloutEngine, deliver: Deliver) -> None:
        self._engine = engine
        self._deliver = deliver

    async def generate(self, request: GenerationRequest) -> Completion:
        return await self._engine.generate(request)

    async def health(self) -> int:
        return await self._engine.health()

    async def update_weights(self, weights: WeightFile, interrupt: Interrupt) -> WeightUpdate:
        await self._deliver(weights)
        return await self._engine.update_weights(weights, interrupt)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(request_ids)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def metrics(self) -> dict[str, float]:
        return await self._engine.metrics()


class ContinuingDeliveringEngine(DeliveringEngine):
    """Implements `contracts.ContinuingEngine`, by such an engine."""

    def __init__(self, engine: ContinuingEngine, deliver: Deliver) -> None:
        super().__init__(engine, deliver)
        self._continuing = engine

    async def progress(self, known: Mapping[str, int]) -> list[Progress]:
        return await self._continuing.progress(known)


def delivering(engine: RolloutEngine, deliver: Deliver) -> DeliveringEngine:
    """`engine`, which takes no weights before `deliver` has returned for them."""
    if isinstance(engine, ContinuingEngine):
        return ContinuingDeliveringEngine(engine, deliver)
    return DeliveringEngine(engine, deliver)
