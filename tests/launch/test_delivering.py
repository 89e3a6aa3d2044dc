"""Weights are where a worker reads them before it is told to."""

from __future__ import annotations

import pytest

from fleuve.contracts import ContinuingEngine, RolloutError
from fleuve.launch.delivering import delivering
from fleuve.types import WeightFile, WeightUpdate

FILE = WeightFile(version=3, path="/w/weights-00000003.safetensors", bytes=1, checksum="crc32:00000000")


class Engine:
    """Notes what it is told, in order."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    async def update_weights(self, weights, interrupt):
        self.order.append(f"read {weights.version}")
        return WeightUpdate(version=weights.version, seconds=0.0, interrupted=0)

    async def generate(self, request): ...
    async def health(self): ...
    async def abort(self, request_ids): ...
    async def pause(self): ...
    async def resume(self): ...
    async def metrics(self): ...


class Continuing(Engine):
    async def progress(self, known):
        return []


async def test_weights_are_brought_first():
    order: list[str] = []

    async def deliver(weights: WeightFile) -> None:
        order.append(f"bring {weights.version}")

    await delivering(Engine(order), deliver).update_weights(FILE, "recompute")
    assert order == ["bring 3", "read 3"]


async def test_what_cannot_be_brought_is_not_read():
    order: list[str] = []

    async def deliver(weights: WeightFile) -> None:
        raise RolloutError("no way there")

    with pytest.raises(RolloutError, match="no way there"):
        await delivering(Engine(order), deliver).update_weights(FILE, "recompute")
    assert order == []


async def test_only_an_engine_whose_answers_can_be_taken_up_says_so():
    async def deliver(weights: WeightFile) -> None: ...

    assert isinstance(delivering(Continuing([]), deliver), ContinuingEngine)
    assert not isinstance(delivering(Engine([]), deliver), ContinuingEngine)
