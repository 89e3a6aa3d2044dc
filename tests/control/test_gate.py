"""The gate: (η + 1) × B slots, freed only by a drop or by weights that are served; every group accounted for."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleuve.control.gate import Gate, State


def test_slots_come_back_only_when_the_weights_made_of_them_are_served():
    gate = Gate(batch_size=2, max_staleness=0)
    groups = [gate.admit(), gate.admit()]
    assert gate.free == 0
    for group in groups:
        gate.finish(group, oldest_version=0)
    assert gate.free == 0
    gate.begin_step(groups)
    gate.end_step(groups, version=1)
    assert gate.free == 0
    gate.serve(1)
    assert gate.free == 2


def test_admission_without_a_free_slot_is_an_error():
    gate = Gate(batch_size=1, max_staleness=0)
    gate.admit()
    with pytest.raises(RuntimeError, match="no slot is free"):
        gate.admit()


def test_capacity_after_a_resume_is_that_of_a_fresh_gate():
    assert Gate(batch_size=4, max_staleness=3, version=100).free == Gate(batch_size=4, max_staleness=3).free == 16


def test_a_group_is_never_trained_twice_nor_dropped_after_training():
    gate = Gate(batch_size=1, max_staleness=1)
    group = gate.admit()
    gate.finish(group, 0)
    gate.begin_step([group])
    gate.end_step([group], 1)
    with pytest.raises(RuntimeError):
        gate.begin_step([group])
    with pytest.raises(RuntimeError):
        gate.drop(group, "late")


def test_a_step_cut_short_puts_its_untrained_groups_back():
    gate = Gate(batch_size=2, max_staleness=0)
    a, b = gate.admit(), gate.admit()
    gate.finish(a, 0)
    gate.finish(b, 0)
    gate.begin_step([a, b])
    gate.end_step([a], 1)
    gate.put_back([b])
    assert (gate.trained, gate.ids(State.READY)) == (1, [b])


def test_slots_are_free_at_once_if_the_weights_are_served_before_the_step_is_accounted_for():
    gate = Gate(batch_size=1, max_staleness=0)
    group = gate.admit()
    gate.finish(group, 0)
    gate.begin_step([group])
    gate.serve(1)
    gate.end_step([group], 1)
    assert gate.free == 1


def test_the_served_version_never_goes_back():
    gate = Gate(batch_size=1, max_staleness=0, version=3)
    with pytest.raises(RuntimeError):
        gate.serve(2)


class GateMachine(RuleBasedStateMachine):
    """Any order of admissions, finishes, drops, steps and deliveries."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.eta = 3, 2
        self.gate = Gate(self.batch_size, self.eta)
        self.version = 0

    @precondition(lambda self: self.gate.free > 0)
    @rule()
    def admit(self) -> None:
        self.gate.admit()

    @precondition(lambda self: self.gate.count(State.RUNNING) > 0)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.gate.finish(data.draw(st.sampled_from(self.gate.ids(State.RUNNING))), self.gate.served_version)

    @precondition(lambda self: self.gate.count(State.RUNNING) + self.gate.count(State.READY) > 0)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ids = self.gate.ids(State.RUNNING) + self.gate.ids(State.READY)
        self.gate.drop(data.draw(st.sampled_from(ids)), "test")

    @precondition(lambda self: self.gate.count(State.READY) >= self.batch_size)
    @rule()
    def step(self) -> None:
        groups = self.gate.ids(State.READY)[: self.batch_size]
        self.gate.begin_step(groups)
        self.version += 1
        self.gate.end_step(groups, self.version)

    @precondition(lambda self: self.version > self.gate.served_version)
    @rule()
    def serve(self) -> None:
        self.gate.serve(self.version)

    @invariant()
    def conservation(self) -> None:
        states = sum(self.gate.count(s) for s in State)
        assert self.gate.admitted == states + self.gate.trained + self.gate.dropped.total()

    @invariant()
    def the_papers_bound(self) -> None:
        admitted = self.gate.admitted - self.gate.dropped.total()
        if admitted:
            assert (admitted - 1) // self.batch_size <= self.gate.served_version + self.eta
        assert self.gate.free == (self.gate.served_version + self.eta + 1) * self.batch_size - admitted


TestGateMachine = GateMachine.TestCase
