"""The scheduler as a pure machine: no model, no cache, tokens are made up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleuve.engine.scheduler import Copy, Limits, Plan, Release, Resize, Scheduler
from fleuve.engine.sequence import Sequence
from fleuve.types import GenerationRequest, SamplingParams

LIMITS = Limits(max_running=8, kv_cache_tokens=1024, prefill_tokens=50, context=512)


def sequence(arrival: int, prompt: int | list[int] = 4, new: int = 10) -> Sequence:
    ids = [arrival] * prompt if isinstance(prompt, int) else prompt
    sampling = SamplingParams(max_new_tokens=new)
    return Sequence.of(GenerationRequest(request_id=str(arrival), input_ids=ids, sampling=sampling), arrival)


def run_step(scheduler: Scheduler, version: int = 0, admit_new: bool = True) -> Plan:
    """One step with a model that always samples token 7, ending what is finished."""
    plan = scheduler.plan(version, admit_new)
    for chunk in plan.chunks:
        if chunk.samples:
            chunk.sequence.append(7, -1.0, version)
    scheduler.fed(plan, version)
    for chunk in plan.chunks:
        if chunk.sequence.finish_reason:
            scheduler.remove(chunk.sequence)
    return plan


class Rows:
    """An independent account of who holds how much, kept from the moves alone; it checks each move and chunk."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.capacity: dict[Sequence, int] = {}
        self.filled: dict[Sequence, int] = {}

    def follow(self, plan: Plan) -> None:
        for move in plan.moves:
            match move:
                case Resize(s, capacity, keep):
                    assert keep <= self.filled.get(s, 0) or keep == 0
                    self.capacity[s], self.filled[s] = capacity, keep
                case Release(s):
                    del self.capacity[s], self.filled[s]
                case Copy(donor, s, tokens):
                    assert donor.prompt == s.prompt
                    assert tokens <= self.filled[donor]
                    self.filled[s] = tokens
        assert sum(self.capacity.values()) <= self.limits.kv_cache_tokens
        assert len(self.capacity) <= self.limits.max_running
        assert sum(c.count for c in plan.chunks if c.count > 1) <= self.limits.prefill_tokens
        assert max(Counter(c.sequence for c in plan.chunks).values(), default=1) == 1
        for chunk in plan.chunks:
            assert chunk.start + chunk.count <= self.capacity[chunk.sequence]
            assert chunk.start <= self.filled[chunk.sequence], "it attends to what is not there"
            self.filled[chunk.sequence] = chunk.start + chunk.count


request_shapes = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 120), st.integers(1, 120), st.integers(0, 30)), min_size=1, max_size=25
)


@settings(max_examples=150)
@given(request_shapes, st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["recompute", "keep"])), max_size=5))
def test_budgets_hold_at_every_step_and_every_request_finishes(shapes, interruptions) -> None:
    limits = Limits(max_running=6, kv_cache_tokens=512, prefill_tokens=40, context=256)
    scheduler, rows = Scheduler(limits), Rows(limits)
    arriving = {}
    for arrival, (prompt, length, new, step) in enumerate(shapes):
        ids = [prompt] * length  # few different prompts: many share
        if scheduler.refusal(length, new) is None:
            arriving.setdefault(step, []).append(sequence(arrival, ids, new))
    everything = [s for group in arriving.values() for s in group]
    version, step = 0, 0
    while arriving or scheduler.running or scheduler.waiting:
        for s in arriving.pop(step, []):
            scheduler.add(s)
        for at, kind in interruptions:
            if at == step:
                version += 1
                scheduler.interrupt(drop_cache=kind == "recompute")
        had_work = bool(scheduler.running or scheduler.waiting)
        plan = run_step(scheduler, version)
        rows.follow(plan)
        assert scheduler.used == sum(s.capacity for s in scheduler.running)
        assert plan.chunks or not had_work, "a step must make progress"
        step += 1
        assert step < 20_000
    for s in everything:
        assert s.num_output == s.request.sampling.max_new_tokens
        assert s.finish_reason == "length"


def test_requests_join_and_leave_at_every_step() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(sequence(1, new=3))
    run_step(scheduler)
    scheduler.add(sequence(2, new=1))
    plan = run_step(scheduler)
    assert [(c.sequence.arrival, c.count) for c in plan.chunks] == [(1, 1), (2, 4)]
    assert [s.arrival for s in scheduler.running] == [1]


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(sequence(1, prompt=4, new=20))
    run_step(scheduler)
    scheduler.add(sequence(2, prompt=120))
    counts = [[(c.sequence.arrival, c.count, c.samples) for c in run_step(scheduler).chunks] for _ in range(4)]
    assert counts == [
        [(1, 1, True), (2, 50, False)],
        [(1, 1, True), (2, 50, False)],
        [(1, 1, True), (2, 20, True)],
        [(1, 1, True), (2, 1, True)],
    ]


def test_siblings_copy_the_prompt_that_the_first_computes() -> None:
    scheduler = Scheduler(LIMITS)
    siblings = [sequence(i, prompt=[5] * 30, new=5) for i in range(4)]
    for s in siblings[:3]:
        scheduler.add(s)
    first = run_step(scheduler)
    assert [(c.sequence.arrival, c.count) for c in first.chunks] == [(0, 30)]
    second = run_step(scheduler)
    assert [m for m in second.moves if isinstance(m, Copy)] == [Copy(siblings[0], s, 29) for s in siblings[1:3]]
    assert [(c.sequence.arrival, c.start, c.count) for c in second.chunks] == [(0, 30, 1), (1, 29, 1), (2, 29, 1)]
    scheduler.add(siblings[3])  # while a donor still runs
    third = run_step(scheduler)
    assert [m.tokens for m in third.moves if isinstance(m, Copy)] == [29]


def test_a_prompt_computed_by_older_weights_is_not_copied() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(sequence(1, prompt=[5] * 30, new=50))
    run_step(scheduler, version=0)
    scheduler.interrupt(drop_cache=False)
    scheduler.add(sequence(2, prompt=[5] * 30, new=50))
    plan = run_step(scheduler, version=1)
    assert not any(isinstance(m, Copy) for m in plan.moves)
    scheduler.add(sequence(3, prompt=[5] * 30, new=50))
    plan = run_step(scheduler, version=1)
    assert [m.donor.arrival for m in plan.moves if isinstance(m, Copy)] == [2]


def test_a_prompt_computed_half_by_older_weights_is_not_copied() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(sequence(1, prompt=[5] * 80, new=50))
    run_step(scheduler, version=0)
    scheduler.interrupt(drop_cache=False)
    run_step(scheduler, version=1)
    scheduler.add(sequence(2, prompt=[5] * 80, new=50))
    assert not any(isinstance(m, Copy) for m in run_step(scheduler, version=1).moves)


def test_other_weights_under_the_same_version_make_a_cached_prompt_old_too() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(sequence(1, prompt=[5] * 30, new=50))
    run_step(scheduler, version=4)
    scheduler.interrupt(drop_cache=False)
    scheduler.add(sequence(2, prompt=[5] * 30, new=50))
    assert not any(isinstance(m, Copy) for m in run_step(scheduler, version=4).moves)


def test_after_an_interruption_siblings_share_the_prompt_again() -> None:
    scheduler = Scheduler(LIMITS)
    for i in range(3):
        scheduler.add(sequence(i, prompt=[5] * 30, new=50))
    for _ in range(5):
        run_step(scheduler, version=0)
    assert scheduler.interrupt(drop_cache=True) == 3
    assert [c.count for c in run_step(scheduler, version=1).chunks] == [35]
    plan = run_step(scheduler, version=1)
    assert sum(isinstance(m, Copy) for m in plan.moves) == 2
    assert [c.count for c in plan.chunks] == [1, 5, 5]


def test_the_youngest_gives_way_and_returns_with_its_tokens() -> None:
    limits = Limits(max_running=8, kv_cache_tokens=128, prefill_tokens=200, context=512)
    scheduler = Scheduler(limits)
    old, young = sequence(1, prompt=60, new=20), sequence(2, prompt=40, new=20)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(4):
        run_step(scheduler)
    assert young in scheduler.running
    while scheduler.preemptions == 0:
        run_step(scheduler)
    assert scheduler.running == [old]
    assert scheduler.waiting == [young]
    kept = list(young.tokens)
    while young.finish_reason is None:
        run_step(scheduler)
    assert old.finish_reason == "length"
    assert young.tokens[: len(kept)] == kept
    assert young.num_output == 20


def test_a_request_that_can_never_fit_is_refused_with_the_reason() -> None:
    scheduler = Scheduler(Limits(max_running=2, kv_cache_tokens=128, prefill_tokens=10, context=256))
    assert scheduler.refusal(100, 29) is None
    assert "kv_cache_tokens is 128" in str(scheduler.refusal(100, 30))
    assert "at most max_new_tokens 156" in str(scheduler.refusal(100, 157))


def test_while_an_update_waits_for_the_end_only_what_had_begun_goes_on() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(sequence(1, new=4))
    run_step(scheduler)
    scheduler.add(sequence(2))
    while scheduler.begun:
        run_step(scheduler, admit_new=False)
    assert [s.arrival for s in scheduler.waiting] == [2]
    assert scheduler.waiting[0].num_output == 0


@pytest.mark.parametrize(("tokens", "capacity"), [(1, 64), (64, 64), (65, 128), (300, 512), (600, 1000), (1000, 1000)])
def test_capacities_are_powers_of_two_up_to_the_context(tokens: int, capacity: int) -> None:
    assert Limits(1, 10_000, 1, context=1000).capacity(tokens) == capacity
