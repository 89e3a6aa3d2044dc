"""Routing: fewest answers in flight first, ties fair and seeded."""

from collections import Counter

import pytest

from fleuve.control.router import Router


def test_the_least_loaded_worker_is_taken():
    router = Router(3, seed=0)
    taken = {router.take(4) for _ in range(3)}
    assert taken == {0, 1, 2}


def test_ties_are_fair_and_repeatable():
    def picks(seed: int) -> list[int]:
        router, out = Router(4, seed), []
        for _ in range(200):
            worker = router.take(1)
            router.give_back(worker, 1)
            out.append(worker)
        return out

    assert picks(1) == picks(1)
    assert all(30 <= n <= 70 for n in Counter(picks(1)).values())


def test_giving_back_more_than_was_taken_is_an_error():
    with pytest.raises(RuntimeError):
        Router(1, 0).give_back(0, 1)
