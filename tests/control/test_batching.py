"""Batches are formed earliest deadline first, and a step waits rather than make a running group miss its deadline."""

import random

from hypothesis import given
from hypothesis import strategies as st

from fleuve.control.batching import earliest_deadlines, feasible, next_batch, surplus
from fleuve.control.gate import Gate, State


def test_the_earliest_deadlines_go_first_and_ties_go_to_the_first_admitted():
    assert earliest_deadlines({5: 2, 7: 1, 3: 2, 4: 2}, 3) == [7, 3, 4]


def test_too_few_ready_groups_make_no_batch():
    assert next_batch({1: 9}, {}, version=0, batch_size=2, wait=False) is None


def test_a_step_waits_for_a_running_group_at_its_deadline():
    ready, running = {1: 5, 2: 5}, {3: 4}
    assert next_batch(ready, running, version=4, batch_size=2, wait=True) is None
    assert next_batch(ready, running, version=4, batch_size=2, wait=False) == [1, 2]


def test_a_step_waits_when_what_is_left_would_not_fit_into_the_later_steps():
    # One group a step: two running ones due by version 2 need the steps from 1 and 2, a third would find no place.
    assert next_batch({9: 3}, {1: 2, 2: 2}, version=0, batch_size=1, wait=True) == [9]
    assert next_batch({9: 3}, {1: 2, 2: 2, 3: 2}, version=0, batch_size=1, wait=True) is None


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 6), max_size=14), st.integers(1, 4))
def test_feasible_is_what_scheduling_earliest_deadline_first_achieves(deadlines, batch_size):
    order = sorted(deadlines.values())
    achieved = all(position // batch_size <= deadline for position, deadline in enumerate(order))
    assert feasible(deadlines, 0, batch_size) == achieved


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 6), min_size=1, max_size=14), st.integers(1, 4), st.data())
def test_dropping_a_group_never_makes_what_is_left_infeasible(deadlines, batch_size, data):
    """Whatever is dropped, and in whatever order: a step that did not have to wait before need not wait after it."""
    order = data.draw(st.permutations(sorted(deadlines)))
    was_feasible = feasible(deadlines, 0, batch_size)
    for group in order:
        deadlines = {g: deadline for g, deadline in deadlines.items() if g != group}
        is_feasible = feasible(deadlines, 0, batch_size)
        assert is_feasible or not was_feasible
        was_feasible = is_feasible
    assert was_feasible


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 5))
def test_with_wait_no_group_is_ever_trained_staler_than_eta_whatever_the_order(seed, batch_size, eta):
    """Random finishing orders, drops and late deliveries; a token is as old as the version served at admission."""
    rng = random.Random(seed)
    gate, version, sampled = Gate(batch_size, eta), 0, {}
    for _ in range(150):
        while gate.free > 0 and rng.random() < 0.9:
            group = gate.admit()
            sampled[group] = gate.served_version
        if (running := gate.ids(State.RUNNING)) and rng.random() < 0.7:
            group = rng.choice(running)
            if rng.random() < 0.1:
                gate.drop(group, "random")
            else:
                gate.finish(group, sampled[group])
        if rng.random() < 0.1 and (held := gate.ids(State.RUNNING) + gate.ids(State.READY)):
            gate.drop(rng.choice(held), "random")
        ready, left = gate.deadlines(gate.ids(State.READY)), gate.deadlines(gate.ids(State.RUNNING))
        if rng.random() < 0.5 and (batch := next_batch(ready, left, version, batch_size, wait=True)):
            assert all(version - sampled[group] <= eta for group in batch)
            gate.begin_step(batch)
            version += 1
            gate.end_step(batch, version)
        if rng.random() < 0.4:
            gate.serve(version)
    # Nothing is stuck: once everything running has finished, the next batch can always be formed.
    gate.serve(version)
    for group in gate.ids(State.RUNNING):
        gate.finish(group, sampled[group])
    while gate.free > 0:
        group = gate.admit()
        gate.finish(group, gate.served_version)
    assert next_batch(gate.deadlines(gate.ids(State.READY)), {}, version, batch_size, wait=True) is not None


@given(st.dictionaries(st.integers(0, 50), st.integers(3, 9), max_size=25), st.integers(0, 8), st.integers(1, 4))
def test_without_the_surplus_every_deadline_can_be_met_and_no_group_is_left_out_in_vain(deadlines, version, batch_size):
    left_out = surplus(deadlines, version, batch_size)
    kept = {g: d for g, d in deadlines.items() if g not in left_out}
    assert feasible(kept, version, batch_size)
    for group in left_out:
        assert not feasible({**kept, group: deadlines[group]}, version, batch_size)
