"""The controller's promises, on virtual time: η is a bound, every group is accounted for, nothing waits for ever."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World, heavy_tail

from fleuve.contracts import RunError
from fleuve.control.fleet import Fleet
from fleuve.control.gate import State
from fleuve.control.past import Past
from fleuve.simulate.clock import run_virtual

SEEDS = st.integers(0, 2**32)


def play(after: Callable[[World], Awaitable[None]] | None = None, **options: object) -> World:
    """Run a world to its end on virtual time; `after` acts while it runs."""

    async def main() -> World:
        world = World(**options)
        helper = asyncio.ensure_future(after(world)) if after else None
        await world.controller.run()
        if helper:
            await helper
        return world

    return run_virtual(main())


def assert_conserved(world: World) -> None:
    gate = world.controller.gate
    assert gate.admitted == sum(gate.count(s) for s in State) + gate.trained + gate.dropped.total()
    assert gate.trained == sum(len(b.groups) for b in world.trainer.batches)
    assert max(world.trained().values()) == 1


@given(SEEDS, st.integers(0, 6), st.integers(1, 5), st.floats(0.001, 1.0), st.floats(0.0, 0.5))
@settings(max_examples=60)
def test_with_wait_no_token_is_trained_staler_than_eta(seed, eta, batch_size, train_seconds, update_seconds):
    world = play(seed=seed, eta=eta, batch_size=batch_size, train_seconds=train_seconds, update_seconds=update_seconds)
    assert max(world.staleness()) <= eta
    assert_conserved(world)
    assert world.controller.version == 20
    assert world.controller.gate.trained == 20 * batch_size
    assert world.controller.pending() == []


def test_eta_0_is_synchronous():
    world = play(eta=0, train_seconds=0.5)
    assert set(world.staleness()) == {0}
    assert world.trainer.generated_while_stepping == 0


def test_eta_1_overlaps_generation_with_training():
    world = play(eta=1, train_seconds=0.5)
    assert world.trainer.generated_while_stepping > 0
    assert max(world.staleness()) == 1


@pytest.mark.parametrize("overdue", ["mask", "train"])
def test_without_wait_a_long_answer_is_trained_beyond_eta_and_no_step_waits_for_it(overdue):
    world = play(eta=1, overdue=overdue, steps=60, train_seconds=0.02)
    assert max(world.staleness()) > 1
    assert_conserved(world)


def test_drop_discards_overdue_groups_counts_them_and_gives_their_prompts_back():
    world = play(eta=1, overdue="drop", steps=60, train_seconds=0.02)
    assert max(world.staleness()) <= 1
    assert world.controller.gate.dropped["overdue"] > 0
    assert_conserved(world)
    issued_again = [p for p, n in world.source.issued.items() if n > 1]
    assert issued_again


@pytest.mark.parametrize("overdue", ["wait", "mask", "train"])
def test_long_answers_are_trained_as_often_as_they_are_issued(overdue):
    world = play(eta=1, overdue=overdue, steps=100, train_seconds=0.02)
    lengths = [len(t.output_ids) for b in world.trainer.batches for t in b.trajectories]
    world_lengths = Counter(lengths)
    assert world_lengths[200] >= 0.01 * len(lengths)
    assert world.source.issued.total() == len(lengths) + world.controller.gate.dropped.total()


def test_a_version_that_the_fleet_skips_is_superseded_by_a_newer_one():
    world = play(eta=8, train_seconds=0.01, update_seconds=0.5)
    assert world.engines[0].served == sorted(world.engines[0].served)
    assert len(world.engines[0].served) < 20
    assert world.engines[0].served[-1] == 20


def test_a_request_that_never_ends_is_dropped_by_name_and_the_version_still_advances():
    async def lose_one(world: World) -> None:
        world.engines[0].fault = lambda r: "hang" if r.request_id == "2/0" else ""

    world = play(lose_one, eta=2, group_timeout=3.0)
    assert world.controller.version == 20
    assert world.controller.gate.dropped == Counter({"timeout": 1}) or world.controller.gate.dropped == Counter()
    assert_conserved(world)


def test_groups_that_fail_give_their_slots_and_prompts_back():
    async def flaky(world: World) -> None:
        for engine in world.engines:
            engine.fault = lambda _, rng=engine.rng: "raise" if rng.random() < 0.3 else ""

    world = play(flaky, eta=1, steps=40)
    assert world.controller.gate.dropped["rollout failed"] > 10
    assert_conserved(world)
    assert world.controller.gate.trained == 160
    assert any("failed" in note for note in world.observer.notes)


def test_when_every_group_fails_the_run_ends_and_says_why():
    with pytest.raises(ExceptionGroup) as caught:
        play(verdict=lambda _: None)
    assert caught.group_contains(RunError, match="prompts in a row failed; the last one: no verdict: verifier")


def test_a_prompt_that_always_fails_is_given_up_and_the_run_goes_on():
    world = play(verdict=lambda prompt: None if prompt.id in ("p3", "p4", "p17") else 1.0, eta=1, steps=30)
    assert world.controller.version == 30
    assert world.controller.gate.dropped == Counter({"no verdict": 6})
    assert [world.source.issued[p] for p in ("p3", "p4", "p17")] == [2, 2, 2]
    assert_conserved(world)


def test_an_error_elsewhere_cuts_the_step_short_and_what_it_trained_counts():
    async def break_a_worker(world: World) -> None:
        await asyncio.sleep(10.0)
        world.engines[0].broken = True

    async def main() -> World:
        world = World(eta=4, train_seconds=3.0, steps=50, workers=1)
        helper = asyncio.ensure_future(break_a_worker(world))
        with pytest.raises(ExceptionGroup):
            await world.controller.run()
        await helper
        return world

    world = run_virtual(main())
    assert world.trainer.interruptions == 1
    assert world.controller.version == world.trainer.version
    assert_conserved(world)
    issued, trained = set(world.source.issued), set(world.trained())
    assert {p.id for p in world.controller.pending()} == issued - trained


def test_stopping_keeps_every_admitted_prompt_that_was_not_trained():
    async def stop_soon(world: World) -> None:
        await asyncio.sleep(1.234)
        world.controller.stop()

    world = play(stop_soon, eta=3, steps=1000)
    issued, trained = set(world.source.issued), set(world.trained())
    assert 0 < world.controller.version < 1000
    assert {p.id for p in world.controller.pending()} == issued - trained


def test_an_evaluation_sees_one_version_and_says_which():
    world = play(eta=4, train_seconds=0.02, evaluate_every=5)
    assert [seen == {version} for version, seen in world.evaluated] == [True] * len(world.evaluated)
    versions = [version for version, _ in world.evaluated]
    assert versions[0] == 0
    assert versions[-1] == 20
    assert len(versions) >= 3
    assert sum("eval/test/pass@1" in row for row in world.observer.steps) == len(versions)
    assert len(world.observer.steps) == 20


@pytest.mark.parametrize("eta", [0, 2])
def test_colocated_never_generates_while_it_trains(eta):
    world = play(eta=eta, placement="colocated", train_seconds=0.3)
    assert world.trainer.generated_while_stepping == 0
    assert max(world.staleness()) <= eta


@given(SEEDS)
@settings(max_examples=20)
def test_colocated_weights_are_not_delivered_to_workers_that_stand_still(seed):
    world = play(
        seed=seed,
        eta=3,
        placement="colocated",
        interrupt="finish",
        update_seconds=0.2,
        train_seconds=0.05,
        evaluate_every=7,
    )
    assert world.controller.version == 20
    assert all(seen == {version} for version, seen in world.evaluated)


def test_the_same_seed_gives_the_same_run():
    def fingerprint() -> list[list[int]]:
        return [[g.id for g in b.groups] for b in play(seed=7, steps=30).trainer.batches]

    assert fingerprint() == fingerprint()


def test_groups_need_not_be_ready_in_order_but_the_step_metrics_count_mixed_versions():
    world = play(eta=2, length=heavy_tail, train_seconds=0.05)
    mixed = sum(len(np.unique(t.versions)) > 1 for b in world.trainer.batches for t in b.trajectories)
    assert sum(m["rollout/interrupted"] for m in world.observer.steps) == mixed > 0


def test_a_run_that_ends_while_the_workers_are_being_paused_leaves_its_batch_ready():
    async def main() -> World:
        world = World(eta=1, placement="colocated")
        run = asyncio.ensure_future(world.controller.run())

        async def never() -> None:
            await asyncio.Event().wait()

        world.engines[0].pause = never
        await asyncio.sleep(5.0)
        run.cancel()
        await asyncio.wait([run])
        return world

    gate = run_virtual(main()).controller.gate
    assert (gate.count(State.STEPPING), gate.trained) == (0, 0)
    assert gate.count(State.READY) >= 4


def test_a_run_that_goes_on_after_a_step_that_was_cut_short_has_room_for_every_group():
    """That step made a version of one group, so not all the others can be trained within η as they are."""

    async def main() -> tuple[World, World]:
        first = World(eta=2, batch_size=4)
        ready = 12
        run = asyncio.ensure_future(first.controller.run())
        while first.controller.gate.count(State.READY) + first.controller.gate.count(State.STEPPING) < ready:  # noqa: ASYNC110 (no event is set for it)
            await asyncio.sleep(0.001)
        run.cancel()
        await asyncio.wait([run])
        assert (first.controller.version, first.controller.gate.trained) == (1, 2)
        past = Past(first.source)
        for record in first.controller.snapshot():
            past.apply(record)
        for engine in first.engines:
            engine.version = past.version
        fleet = Fleet(first.engines, 0, past.version)
        second = World(eta=2, batch_size=4, source=first.source, engines=first.engines, fleet=fleet, past=past)
        second.trainer.version = past.version
        async with asyncio.timeout(1000.0):
            await second.controller.run()
        return first, second

    first, second = run_virtual(main())
    assert second.controller.version == 20
    assert max(second.staleness()) <= 2
    assert max((first.trained() + second.trained()).values()) == 1
