"""Whatever the fleet was about when a run ends, nothing of it goes on."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mortal import Hospital, fleet_of
from world import Notes

from fleuve.control.fleet import Fleet, FleetPolicy
from fleuve.simulate.clock import run_virtual


def left_over(seed: int, seconds: float, at_departure: bool) -> list[asyncio.Task[object]]:
    """Tasks that go on once tending was cancelled, after `seconds` in which workers came, went, hung and died; or
    `at_departure`, the moment that one has left after that."""
    rng = random.Random(seed)

    def remove(fleet: Fleet, name: str, at_once: bool) -> None:
        with suppress(ValueError):  # the last that can sample may not leave
            fleet.remove(name, at_once=at_once)

    async def upheaval(fleet: Fleet, hospital: Hospital) -> None:
        while True:
            await asyncio.sleep(rng.expovariate(3.0))
            engine = rng.choice(list(hospital.now.values()))
            staying = [name for name, worker in fleet.workers.items() if not worker.leaving]
            match rng.choice(["die", "stop", "go on", "doubt", "add", "remove", "remove", "at once", "at once"]):
                case "die":
                    engine.die()
                    for life in fleet.lives():
                        fleet.doubt(life)
                    await asyncio.sleep(rng.uniform(0.0, 0.2))
                    if len(staying) > 1 and engine.name in staying:
                        remove(fleet, engine.name, at_once=rng.random() < 0.8)
                case "stop":
                    engine.stop()
                case "go on":
                    engine.go_on()
                case "doubt":
                    for life in fleet.lives()[:1]:
                        fleet.doubt(life)
                case "add" if len(staying) < 4:
                    fleet.add()
                case removal if len(staying) > 1:
                    remove(fleet, rng.choice(staying), at_once=removal == "at once")

    async def main() -> list[asyncio.Task[object]]:
        hospital = Hospital(3)
        fleet = fleet_of(hospital, Notes(), FleetPolicy())
        tasks = [asyncio.create_task(fleet.tend()), asyncio.create_task(upheaval(fleet, hospital))]
        await asyncio.sleep(seconds)
        if at_departure:
            before = set(fleet.workers)
            with suppress(TimeoutError):  # a name may be given again before anybody looks
                async with asyncio.timeout(60.0):
                    await fleet.changed.until(lambda: not before <= set(fleet.workers))
        for task in reversed(tasks):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return run_virtual(main(), seed)


@given(st.integers(0, 2**32), st.floats(0.0, 20.0), st.booleans())
@settings(max_examples=50)
def test_no_task_is_left_over_whoever_came_hung_died_or_left_before_the_end(seed, seconds, at_departure):
    assert left_over(seed, seconds, at_departure) == []


def test_the_probe_of_a_worker_that_has_left_at_once_is_ended_too():
    async def main() -> None:
        hospital = Hospital(2)
        fleet = fleet_of(hospital, Notes(), FleetPolicy())
        tending = asyncio.create_task(fleet.tend())
        await asyncio.sleep(0.5)
        hospital.now["worker-1"].die()
        fleet.doubt(fleet.lives()[1])
        await asyncio.sleep(0.02)  # refused; it is asked again in a moment
        fleet.remove("worker-1", at_once=True)
        await fleet.changed.until(lambda: "worker-1" not in fleet.workers)
        tending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await tending
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def test_who_joins_while_tending_ends_is_not_looked_after_and_harms_nobody():
    async def main() -> None:
        hospital = Hospital(1)
        fleet = fleet_of(hospital, Notes(), FleetPolicy())
        tending = asyncio.create_task(fleet.tend())
        await asyncio.sleep(0.5)
        tending.cancel()
        joined = 0
        while not tending.done():  # at every moment of the end
            await asyncio.sleep(0)
            fleet.add()
            joined += 1
        assert joined > 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
