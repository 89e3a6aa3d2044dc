"""Cycles are looked for seldom, but they are, and only while a controller runs."""

import gc
import weakref

from world import World

from fleuve.control.garbage import THRESHOLDS, seldom_collected
from fleuve.simulate.clock import run_virtual


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.self = self


def test_afterwards_all_is_as_it_was():
    before = gc.get_threshold()
    with seldom_collected():
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == before


def test_cyclic_garbage_does_not_pile_up():
    alive: weakref.WeakSet[Knot] = weakref.WeakSet()
    most = 0
    with seldom_collected():
        for _ in range(20):
            for _ in range(10_000):
                alive.add(Knot())
            most = max(most, len(alive))
    assert most <= THRESHOLDS[0] + 10_000


def test_a_controller_runs_like_that():
    seen = []

    async def main() -> None:
        world = World(steps=2)
        step = world.trainer.step

        async def watched(batch):
            seen.append(gc.get_threshold())
            return await step(batch)

        world.trainer.step = watched
        await world.controller.run()

    before = gc.get_threshold()
    run_virtual(main())
    assert seen == [THRESHOLDS] * 2
    assert gc.get_threshold() == before
