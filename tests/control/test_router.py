"""Routing: fewest answers in flight first, ties fair and seeded."""

from collections import Counter

import pytest

from fleuve.control.router import Router


def router_with(workers: int, seed: int = 0) -> Router[int]:
    router: Router[int] = Router(seed)
    for worker in range(workers):
        router.join(worker)
    return router


def test_the_least_loaded_worker_is_taken():
    router = router_with(3)
    taken = {router.take(4) for _ in range(3)}
    assert taken == {0, 1, 2}


def test_ties_are_fair_and_repeatable():
    def picks(seed: int) -> list[int]:
        router, out = router_with(4, seed), []
        for _ in range(200):
            worker = router.take(1)
            router.give_back(worker, 1)
            out.append(worker)
        return out

    assert picks(1) == picks(1)
    assert all(30 <= n <= 70 for n in Counter(picks(1)).values())


def test_giving_back_more_than_was_taken_is_an_error():
    with pytest.raises(RuntimeError):
        router_with(1).give_back(0, 1)


def test_one_that_is_held_back_gets_nothing_new_and_keeps_what_it_has():
    router = router_with(2)
    first = router.take(4)
    router.hold_back(first)
    assert {router.take(1) for _ in range(20)} == {1 - first}
    assert router.in_flight[first] == 4
    router.join(first)
    assert router.take(1) == first


def test_what_was_in_flight_on_one_that_left_is_not_counted_any_more():
    router = router_with(2)
    taken = router.take(4)
    router.leave(taken)
    router.give_back(taken, 4)
    router.join(taken)
    assert router.in_flight[taken] == 0


def test_with_every_worker_held_back_there_is_nothing_to_take():
    router = router_with(1)
    router.hold_back(0)
    assert not router.open
    with pytest.raises(RuntimeError):
        router.take(1)
