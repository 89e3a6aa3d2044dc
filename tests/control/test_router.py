"""Routing: fewest tokens in flight first, none to a full cache while another has room, ties fair and seeded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleuve.control.router import HIGH, LOW, STRETCH, ExpectedLength, Pressure, Router, Seat


def router_with(workers: int, seed: int = 0) -> Router[int]:
    router: Router[int] = Router(seed)
    for worker in range(workers):
        router.join(worker)
    return router


def test_the_worker_with_the_fewest_tokens_is_taken_not_that_with_the_fewest_answers():
    router = router_with(2)
    long = router.take(1, 1000)
    short = router.take(4, 100)
    assert {long.worker, short.worker} == {0, 1}
    assert [router.take(1, 100).worker for _ in range(5)] == [short.worker] * 5


def test_answers_weigh_until_they_end_and_not_until_their_group_does():
    router = router_with(2)
    first = router.take(8, 100)
    router.take(4, 100)
    router.give_back(first, 7)
    assert router.take(1, 100).worker == first.worker
    assert router.in_flight == {first.worker: 2, 1 - first.worker: 4}


def test_ties_are_fair_and_repeatable():
    """Pitfall 24."""

    def picks(seed: int) -> list[int]:
        router, out = router_with(4, seed), []
        for _ in range(200):
            seat = router.take(1, 50)
            router.give_back(seat, 1)
            out.append(seat.worker)
        return out

    assert picks(1) == picks(1) != picks(2)
    assert all(30 <= n <= 70 for n in Counter(picks(1)).values())


def test_giving_back_more_than_was_taken_is_an_error():
    router = router_with(1)
    seat = router.take(2, 10)
    router.give_back(seat, 2)
    with pytest.raises(RuntimeError, match="0 answers in flight on 0, not 1"):
        router.give_back(seat, 1)


def test_one_that_is_held_back_gets_nothing_new_and_keeps_what_it_has():
    router = router_with(2)
    first = router.take(4, 10).worker
    router.hold_back(first)
    assert {router.take(1, 10).worker for _ in range(20)} == {1 - first}
    assert router.in_flight[first] == 4
    router.join(first)
    assert router.take(1, 10).worker == first


def test_what_was_in_flight_on_one_that_left_is_not_counted_any_more():
    router = router_with(2)
    seat = router.take(4, 10)
    router.leave(seat.worker)
    router.give_back(seat, 4)
    router.join(seat.worker)
    assert router.in_flight[seat.worker] == 0


def test_with_every_worker_held_back_there_is_nothing_to_take():
    router = router_with(1)
    router.hold_back(0)
    assert not router.open
    with pytest.raises(RuntimeError):
        router.take(1, 10)


def test_a_full_cache_gets_nothing_while_another_has_room_and_is_hardly_heavier():
    router = router_with(3)
    for _ in range(3):
        router.take(10, 100)
    router.press(0, True)
    router.press(1, True)
    assert [router.take(1, 100).worker for _ in range(3)] == [2, 2, 2]
    assert router.take(1, 100).worker in (0, 1)  # by now it is 1.3 times as heavy as they are
    router.press(2, True)
    assert {router.take(1, 100).worker for _ in range(3)} == {0, 1}
    router.press(0, False)
    assert router.take(1, 100).worker == 0


class Routing(RuleBasedStateMachine):
    """Against a plain model of what is in flight where."""

    def __init__(self) -> None:
        super().__init__()
        self.router: Router[int] = Router(3)
        self.load: dict[int, tuple[int, int]] = {}
        self.open: set[int] = set()
        self.pressed: set[int] = set()
        self.seats: list[Seat[int]] = []

    @rule(worker=st.integers(0, 5))
    def join(self, worker: int) -> None:
        self.router.join(worker)
        self.load.setdefault(worker, (0, 0))
        self.open.add(worker)

    @rule(worker=st.integers(0, 5))
    def hold_back(self, worker: int) -> None:
        self.router.hold_back(worker)
        self.open.discard(worker)

    @rule(worker=st.integers(0, 5))
    def leave(self, worker: int) -> None:
        self.router.leave(worker)
        self.load.pop(worker, None)
        self.open.discard(worker)
        self.pressed.discard(worker)
        self.seats = [s for s in self.seats if s.worker != worker]

    @rule(worker=st.integers(0, 5), pressed=st.booleans())
    def press(self, worker: int, pressed: bool) -> None:
        self.router.press(worker, pressed)
        (self.pressed.add if pressed and worker in self.load else self.pressed.discard)(worker)

    @precondition(lambda self: self.open)
    @rule(answers=st.integers(1, 9), tokens=st.integers(1, 5000))
    def take(self, answers: int, tokens: int) -> None:
        seat = self.router.take(answers, tokens)
        least = min(self.load[w][1] for w in self.open)
        roomy = (
            {w for w in self.open - self.pressed if self.load[w][1] <= STRETCH * least} if self.pressed else self.open
        )
        assert self.load[seat.worker][1] == min(self.load[w][1] for w in roomy or self.open)
        assert seat.worker in (roomy or self.open)
        self._count(seat, answers)
        self.seats.append(seat)

    @precondition(lambda self: self.seats)
    @rule(which=st.integers(0, 100), share=st.floats(0, 1))
    def end_some(self, which: int, share: float) -> None:
        seat = self.seats[which % len(self.seats)]
        ended = round(seat.answers * share)
        self.router.give_back(seat, ended)
        self._count(seat, -ended)

    def _count(self, seat: Seat[int], answers: int) -> None:
        have, tokens = self.load[seat.worker]
        self.load[seat.worker] = have + answers, tokens + answers * seat.tokens

    @invariant()
    def counts_agree(self) -> None:
        assert self.router.in_flight == {worker: answers for worker, (answers, _) in self.load.items()}
        assert self.router.open == bool(self.open)
        assert all(self.router.busy(w) == (n > 0) for w, (n, _) in self.load.items())


TestRouting = Routing.TestCase


def test_pressure_begins_high_ends_low_and_follows_preemptions():
    pressure = Pressure()
    uses = [0.5, HIGH - 0.01, HIGH, LOW + 0.01, LOW - 0.01, HIGH - 0.01]
    assert [pressure.look({"kv_cache_use": use}) for use in uses] == [False, False, True, True, False, False]
    assert [pressure.look({"preemptions": n}) for n in (0, 3, 3, 4)] == [False, True, False, True]
    assert not Pressure().look({"tokens_generated": 5.0})


def test_answers_are_expected_to_be_as_long_as_those_before_and_as_they_may_be_when_there_are_none():
    lengths = ExpectedLength()
    assert lengths.of(4096) == 4096
    for _ in range(200):
        lengths.ended(100)
    assert 100 <= lengths.of(4096) <= 300
    assert lengths.of(50) == 50
    for _ in range(5000):
        lengths.ended(1000)
    assert lengths.of(4096) == pytest.approx(1000, rel=0.05)
