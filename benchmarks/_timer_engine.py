"""An engine whose answers are timers, for `benchmarks/controller.py` and its servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from fleuve.types import Completion, GenerationRequest, Interrupt, WeightFile, WeightUpdate

WHEEL = 0.01
"""Seconds for which ends of answers are gathered, so that a timer serves many of them."""


class TimerEngine:
    """Implements `contracts.RolloutEngine` with a wheel of timers: an answer has `tokens`, in arrays that take no
    memory, and comes after a time drawn uniformly around `seconds`."""

    def __init__(self, seed: int, seconds: float, tokens: int) -> None:
        self.version = 0
        self.answers = 0
        self.in_flight = 0
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._ids = np.broadcast_to(np.int32(7), tokens)
        self._logprobs = np.broadcast_to(np.float32(-1.0), tokens)
        self._slots: dict[int, list[asyncio.Future[None]]] = {}

    async def generate(self, request: GenerationRequest) -> Completion:
        self.in_flight += 1
        try:
            await self._after(self._seconds * (0.5 + self._rng.random()))
        finally:
            self.in_flight -= 1
        self.answers += 1
        return Completion(
            request_id=request.request_id,
            output_ids=self._ids,  # type: ignore[arg-type]
            logprobs=self._logprobs,  # type: ignore[arg-type]
            versions=np.broadcast_to(np.int32(self.version), len(self._ids)),  # type: ignore[arg-type]
            finish_reason="stop",
        )

    def _after(self, seconds: float) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        slot = int((loop.time() + seconds) / WHEEL) + 1
        if slot not in self._slots:
            self._slots[slot] = []
            loop.call_at(slot * WHEEL, self._turn, slot)
        future: asyncio.Future[None] = loop.create_future()
        self._slots[slot].append(future)
        return future

    def _turn(self, slot: int) -> None:
        for future in self._slots.pop(slot):
            if not future.done():
                future.set_result(None)

    async def update_weights(self, weights: WeightFile, interrupt: Interrupt) -> WeightUpdate:
        self.version = weights.version
        return WeightUpdate(version=weights.version, interrupted=self.in_flight, seconds=0.0)

    async def health(self) -> int:
        return self.version

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def metrics(self) -> dict[str, float]:
        return {"tokens_generated": float(self.answers), "running": float(self.in_flight)}
