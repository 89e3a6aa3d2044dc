"""The schedule finds at once what `batching.next_batch` defines."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleuve.control.batching import next_batch
from fleuve.control.gate import Gate, State
from fleuve.control.schedule import Schedule

DEADLINES = st.dictionaries(st.integers(0, 40), st.integers(0, 6), max_size=16)


def schedule_of(ready: dict[int, int], running: dict[int, int]) -> Schedule:
    schedule = Schedule()
    for group in random.Random(str(ready)).sample(sorted(ready), len(ready)):
        schedule.add_ready(group, ready[group])
    for deadline in running.values():
        schedule.run(deadline)
    return schedule


@given(DEADLINES, DEADLINES, st.integers(0, 7), st.integers(1, 4), st.booleans())
def test_the_next_batch_is_the_one_that_is_defined(ready, running, version, batch_size, wait):
    running = {group + 100: deadline for group, deadline in running.items()}
    schedule = schedule_of(ready, running)
    assert schedule.next_batch(version, batch_size, wait=wait) == next_batch(
        ready, running, version, batch_size, wait=wait
    )


@given(DEADLINES, DEADLINES, st.integers(0, 7))
def test_a_group_is_overdue_when_its_deadline_is_past(ready, running, version):
    overdue = any(deadline < version for deadline in [*ready.values(), *running.values()])
    assert schedule_of(ready, running).any_overdue(version) == overdue


def test_a_group_that_does_not_wait_cannot_be_taken_out():
    schedule = schedule_of({1: 5, 3: 5}, {})
    with pytest.raises(KeyError):
        schedule.remove_ready(2, 5)
    with pytest.raises(KeyError):
        schedule.remove_ready(1, 6)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 5), st.booleans())
def test_whatever_happens_to_groups_the_gate_finds_what_is_defined(seed, batch_size, eta, wait):
    """Random finishing orders, drops, steps cut short, late deliveries, a ledger taken over half-way."""
    rng = random.Random(seed)
    gate, version = Gate(batch_size, eta), 0
    for turn in range(120):
        while gate.free > 0 and rng.random() < 0.8:
            gate.admit()
        if (running := gate.ids(State.RUNNING)) and rng.random() < 0.7:
            gate.finish(rng.choice(running), rng.randint(max(0, version - eta), version))
        if (alive := gate.ids(State.RUNNING) + gate.ids(State.READY)) and rng.random() < 0.1:
            gate.drop(rng.choice(alive), "random")
        ready, running = gate.deadlines(gate.ids(State.READY)), gate.deadlines(gate.ids(State.RUNNING))
        batch = gate.next_batch(version, wait=wait)
        assert batch == next_batch(ready, running, version, batch_size, wait=wait)
        late = [group for group, deadline in {**ready, **running}.items() if deadline < version]
        assert gate.overdue(version, [*ready, *running]) == late
        for state, ids in ((State.READY, ready), (State.RUNNING, running)):
            assert gate.count(state) == len(ids)
        if batch and rng.random() < 0.5:
            gate.begin_step(batch)
            assert gate.count(State.STEPPING) == batch_size
            trained = batch if rng.random() < 0.8 else batch[: rng.randrange(batch_size)]
            gate.put_back(batch[len(trained) :])
            if trained:
                version += 1
                gate.end_step(trained, version)
        if rng.random() < 0.4:
            gate.serve(version)
        if turn == 60:
            live = dict.fromkeys(gate.ids(State.RUNNING) + gate.ids(State.READY), version)
            before, gate = gate, Gate(batch_size, eta, version)
            gate.resume(before.admitted, before.trained, before.dropped, live)


@pytest.mark.parametrize("groups", [100, 10_000])
def test_a_group_costs_as_many_comparisons_as_the_number_of_groups_has_digits(groups):
    """Counted, and not timed, so that it is the same on any machine: a sort at each event would cost `groups` each."""
    count = 0

    class Id(int):
        def __lt__(self, other: int) -> bool:
            nonlocal count
            count += 1
            return int.__lt__(self, other)

    schedule = Schedule()
    for group in random.Random(0).sample(range(groups), groups):
        schedule.run(group % 4)
        schedule.end_run(group % 4)
        schedule.add_ready(Id(group), group % 4)
        schedule.next_batch(0, groups + 1, wait=True)
    assert count <= groups * (math.log2(groups / 4) + 1)
