"""A worker's health, as a machine: what each piece of news does in each state, for any course of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleuve.control.health import Health, HealthPolicy, HealthRecord

POLICY = HealthPolicy(misses=3, refusals=2, first_delay=1.0, longest_delay=16.0, forgiven_after=100.0)


def healthy(now: float = 0.0) -> HealthRecord:
    return HealthRecord(POLICY, Health.HEALTHY, now)


def killed_and_back(record: HealthRecord, now: float) -> float:
    """Lose it at `now`, start it as soon as that is allowed, sync it at once; the time then."""
    record.lost(now)
    now = max(now, record.restart_at)
    record.start(now)
    record.started()
    record.synced(now)
    return now


def test_one_missed_probe_makes_it_suspect_and_an_answer_healthy_again():
    record = healthy()
    record.missed(1.0)
    assert record.state is Health.SUSPECT
    record.answered()
    assert record.state is Health.HEALTHY


def test_missed_probes_in_a_row_make_it_dead_and_an_answer_in_between_starts_the_count_again():
    record = healthy()
    for _ in range(20):
        record.missed(1.0)
        record.missed(2.0)
        record.answered()
    assert record.state is Health.HEALTHY
    for _ in range(3):
        record.missed(3.0)
    assert record.state is Health.DEAD


def test_a_connection_that_is_refused_twice_in_a_row_is_a_death_and_once_is_not():
    record = healthy()
    record.refused(1.0)
    assert record.state is Health.SUSPECT
    record.refused(1.2)
    assert record.state is Health.DEAD


def test_a_suspect_may_still_be_sampling_but_one_that_resyncs_is_not_yet():
    record = healthy()
    record.doubt()
    assert record.state is Health.SUSPECT
    assert record.living
    record.lost(1.0)
    assert not record.living
    record.start(1.0)
    record.started()
    assert record.state is Health.RESYNCING
    assert not record.living


def test_one_that_hangs_while_it_takes_up_the_weights_is_dead_too():
    record = HealthRecord(POLICY, Health.STARTING)
    record.started()
    for _ in range(3):
        record.missed(1.0)
    assert record.state is Health.DEAD


def test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long_up_to_the_longest():
    record, now, waits = healthy(), 10.0, []
    for _ in range(8):
        record.lost(now)
        waits.append(record.restart_at - now)
        now = record.restart_at
        record.start(now)
        record.started()
        record.synced(now)
    assert waits == [0, 1, 2, 4, 8, 16, 16, 16]


def test_a_start_that_fails_counts_as_a_death():
    record = healthy()
    record.lost(0.0)
    record.start(0.0)
    record.lost(5.0)
    assert record.restart_at == 6.0


def test_one_that_was_well_for_long_enough_begins_afresh():
    record, now = healthy(), 0.0
    for _ in range(5):
        now = killed_and_back(record, now)
    record.lost(now + 99.0)
    assert record.restart_at == now + 99.0 + 16.0
    now = record.restart_at
    record.start(now)
    record.started()
    record.synced(now)
    record.lost(now + 100.0)
    assert record.restart_at == now + 100.0


def test_it_is_not_started_before_its_time_or_twice():
    record, now = healthy(), 0.0
    now = killed_and_back(record, now)
    record.lost(now)
    with pytest.raises(RuntimeError):
        record.start(now + 0.5)
    assert record.state is Health.DEAD
    record.start(now + 1.0)
    with pytest.raises(RuntimeError):
        record.start(now + 1.0)


@given(st.integers(0, 2000))
def test_the_back_off_is_bounded_for_any_number_of_deaths(deaths):
    assert 0.0 <= POLICY.delay(deaths) <= POLICY.longest_delay
    assert POLICY.delay(deaths) <= POLICY.delay(deaths + 1)


class AnyCourse(RuleBasedStateMachine):
    """Every order of events: living is what the news allow, and the way back from death leads through a resync."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.record = healthy()
        self.silent = self.refusals = 0
        self.synced_since_death = True

    @rule(seconds=st.floats(0.0, 50.0))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def answer(self):
        self.record.answered()
        self.silent = self.refusals = 0

    @rule()
    def miss(self):
        self.silent += self.record.probed
        self.record.missed(self.now)
        self.death()

    @rule()
    def refuse(self):
        self.refusals += self.record.probed
        self.record.refused(self.now)
        self.death()

    @rule()
    def doubt(self):
        self.record.doubt()

    @precondition(lambda self: self.record.state is not Health.DEAD)
    @rule()
    def lose(self):
        self.record.lost(self.now)
        self.death()

    @precondition(lambda self: self.record.state is Health.DEAD)
    @rule()
    def start(self):
        self.now = max(self.now, self.record.restart_at)
        self.record.start(self.now)

    @precondition(lambda self: self.record.state is Health.STARTING)
    @rule()
    def started(self):
        self.record.started()

    @precondition(lambda self: self.record.state is Health.RESYNCING)
    @rule()
    def synced(self):
        self.record.synced(self.now)
        self.synced_since_death = True

    def death(self) -> None:
        if self.record.state is Health.DEAD:
            self.silent = self.refusals = 0
            self.synced_since_death = False

    @invariant()
    def it_lives_only_with_the_current_weights(self):
        assert not self.record.living or self.synced_since_death

    @invariant()
    def it_dies_of_silence_and_refusal_in_time(self):
        assert self.silent < POLICY.misses
        assert self.refusals < POLICY.refusals

    @invariant()
    def a_restart_is_never_further_away_than_the_longest_delay(self):
        assert self.record.restart_at <= self.now + POLICY.longest_delay


TestAnyCourse = AnyCourse.TestCase
