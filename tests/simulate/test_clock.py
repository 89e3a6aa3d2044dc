"""Virtual time: the clock jumps, simultaneous events are ordered by a seed."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from fleuve.simulate.clock import run_virtual


async def _order_of(at: list[float]) -> list[int]:
    done: list[int] = []

    async def sleeper(number: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        done.append(number)

    await asyncio.gather(*(sleeper(number, seconds) for number, seconds in enumerate(at)))
    return done


def test_sleeping_for_a_week_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(7 * 24 * 3600)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert run_virtual(main()) == 7 * 24 * 3600
    assert time.monotonic() - started < 2


def test_nothing_left_to_wait_for_is_an_error_at_once() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(main())


def test_without_a_seed_simultaneous_timers_go_off_in_the_order_they_were_set() -> None:
    assert run_virtual(_order_of([1.0] * 50)) == list(range(50))


def test_seeds_give_every_order_of_simultaneous_timers_and_each_the_same_again() -> None:
    orders = {seed: tuple(run_virtual(_order_of([1.0] * 3), seed)) for seed in range(60)}
    assert set(orders.values()) == set(itertools.permutations(range(3)))
    assert all(tuple(run_virtual(_order_of([1.0] * 3), seed)) == order for seed, order in orders.items())


def test_a_seed_never_lets_a_later_timer_go_first() -> None:
    for seed in range(20):
        order = run_virtual(_order_of([2.0, 1.0, 2.0, 1.0]), seed)
        assert set(order[:2]) == {1, 3}
