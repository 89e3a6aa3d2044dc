"""The fleet, on virtual time: workers that die, hang, join and leave cost no group, and sample nothing too old."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mortal import Hospital, fleet_of, token
from world import Notes, World

from fleuve.contracts import RolloutError, RunError, WorkerLostError
from fleuve.control.fleet import Fleet, FleetPolicy
from fleuve.control.gate import State
from fleuve.control.health import Health, HealthPolicy
from fleuve.simulate.clock import run_virtual
from fleuve.types import Completion, GenerationRequest, SamplingParams, WeightFile


def weights(version: int) -> WeightFile:
    return WeightFile(version=version, path="", bytes=0, checksum="")


def request(name: str, seed: int = 0) -> GenerationRequest:
    return GenerationRequest(request_id=name, input_ids=[1], sampling=SamplingParams(max_new_tokens=1000, seed=seed))


def now() -> float:
    return asyncio.get_running_loop().time()


class Ward:
    """A fleet of two that is tended to, and what is said of it."""

    def __init__(self, workers: int = 2, continuing: bool = False, **policy: object) -> None:
        self.hospital = Hospital(workers, continuing=continuing)
        self.hospital.length = lambda _: 100  # a second
        self.notes = Notes()
        self.fleet = fleet_of(self.hospital, self.notes, FleetPolicy(**policy))  # type: ignore[arg-type]

    async def answer(self, name: str = "a", seed: int = 7) -> Completion:
        async with self.fleet.worker(1) as lease:
            return await lease.generate(request(name, seed))

    async def until(self, name: str, state: Health) -> float:
        await self.fleet.changed.until(lambda: self.fleet.states().get(name) is state)
        return now()


def tended(
    course: Callable[[Ward], Awaitable[None]], workers: int = 2, continuing: bool = False, **policy: object
) -> Ward:
    """Play `course` on virtual time with a ward that is tended to."""

    async def main() -> Ward:
        ward = Ward(workers, continuing, **policy)
        async with asyncio.TaskGroup() as tasks:
            tending = tasks.create_task(ward.fleet.tend())
            async with asyncio.timeout(1000):
                await course(ward)
            tending.cancel()
        return ward

    return run_virtual(main())


# --- death and silence ----------------------------------------------------------------------------------------------


def test_an_idle_worker_that_is_killed_is_noticed_within_two_seconds():
    async def course(ward: Ward) -> None:
        await asyncio.sleep(0.3)
        ward.hospital.now["worker-1"].die()
        assert await ward.until("worker-1", Health.DEAD) <= 2.3
        await ward.until("worker-1", Health.HEALTHY)

    assert "worker-1" in tended(course).hospital.killed


def test_a_worker_that_is_stopped_is_suspect_within_four_seconds_and_dead_within_twelve():
    async def course(ward: Ward) -> None:
        ward.hospital.now["worker-1"].stop()
        assert await ward.until("worker-1", Health.SUSPECT) <= 4.0
        assert await ward.until("worker-1", Health.DEAD) <= 12.0

    tended(course)


def test_a_worker_that_stands_still_for_a_moment_is_not_given_up():
    async def course(ward: Ward) -> None:
        engine = ward.hospital.now["worker-1"]
        engine.stop()
        await asyncio.sleep(6.0)
        engine.go_on()
        await ward.until("worker-1", Health.HEALTHY)
        await asyncio.sleep(20.0)

    ward = tended(course)
    assert ward.hospital.killed == []
    assert ward.fleet.restarts == 0


def test_an_engine_that_is_stuck_behind_a_server_that_is_well_is_given_up_when_its_counters_do_not_come():
    async def course(ward: Ward) -> None:
        answer = asyncio.ensure_future(ward.answer())
        await asyncio.sleep(0.5)
        (busy,) = [e for e in ward.hospital.now.values() if e.active]
        busy.stuck = True
        await asyncio.sleep(30.0)
        assert ward.fleet.states()[busy.name] is Health.HEALTHY
        await ward.fleet.metrics()  # the controller asks for them every second
        await answer
        assert busy.dead

    assert tended(course).fleet.moved == 1


def test_a_suspect_gets_no_new_groups():
    async def course(ward: Ward) -> None:
        ward.hospital.now["worker-1"].stop()
        await ward.until("worker-1", Health.SUSPECT)
        await asyncio.gather(*(ward.answer(str(index)) for index in range(20)))
        assert len(ward.hospital.now["worker-0"].requests) == 20

    tended(course)


@pytest.mark.parametrize("how", ["die", "stop"])
def test_the_answers_of_a_lost_worker_are_taken_up_by_another_and_are_the_same(how):
    async def course(ward: Ward) -> None:
        undisturbed = (await ward.answer("b", seed=5)).output_ids
        answer = asyncio.ensure_future(ward.answer("a", seed=5))
        await asyncio.sleep(0.5)
        (busy,) = [e for e in ward.hospital.now.values() if e.active]
        getattr(busy, how)()
        completion = await answer
        assert completion.output_ids == undisturbed
        assert completion.request_id == "a"

    assert tended(course).fleet.moved == 1


def test_finished_answers_of_the_group_are_kept_and_the_others_move_together():
    async def course(ward: Ward) -> None:
        ward.hospital.length = lambda rng: 20 if rng.random() < 0.5 else 100
        async with ward.fleet.worker(8) as lease:
            answers = [asyncio.ensure_future(lease.generate(request(str(i), seed=i + 1))) for i in range(8)]
            await asyncio.sleep(0.6)
            done = sum(a.done() for a in answers)
            assert 0 < done < 8
            (busy,) = [e for e in ward.hospital.now.values() if e.active]
            busy.die()
            await asyncio.gather(*answers)
        (other,) = [e for e in ward.hospital.engines if e.requests and e is not busy]
        assert len(other.requests) == 8 - done
        assert sum(ward.fleet.router.in_flight.values()) == 0

    tended(course)


def test_a_request_that_fails_on_a_worker_that_is_well_is_the_requests_own_fault():
    async def course(ward: Ward) -> None:
        for engine in ward.hospital.now.values():
            engine.fault = lambda _: "raise"
        with pytest.raises(RolloutError, match="a failed"):
            await ward.answer("a")
        assert set(ward.fleet.states().values()) == {Health.HEALTHY}

    assert tended(course).fleet.moved == 0


def test_a_group_that_loses_one_worker_after_the_other_fails_in_the_end():
    async def course(ward: Ward) -> None:
        answer = asyncio.ensure_future(ward.answer())
        for _ in range(3):
            await asyncio.sleep(0.5)
            (busy,) = [e for e in ward.hospital.now.values() if e.active]
            busy.die()
        with pytest.raises(RolloutError):
            await answer

    tended(course, workers=4, losses=3)


def test_what_a_worker_says_after_it_was_given_up_is_not_taken():
    async def course(ward: Ward) -> None:
        answer = asyncio.ensure_future(ward.answer())
        await asyncio.sleep(0.5)
        (busy,) = [e for e in ward.hospital.now.values() if e.active]
        busy.stop()
        other = next(e for e in ward.hospital.now.values() if e is not busy)
        await ward.until(busy.name, Health.DEAD)
        await ward.fleet.update(weights(3), "recompute")
        busy.dead = False
        busy.go_on()  # before it is killed: it would go on with version 0
        assert set((await answer).versions) <= {0, 3}
        assert other.requests

    tended(course)


# --- answers that go on behind their known tokens -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["die", "stop"])
def test_an_answer_goes_on_behind_the_tokens_that_are_known_of_it(how):
    async def course(ward: Ward) -> None:
        ward.hospital.length = lambda _: 500
        answer = asyncio.ensure_future(ward.answer("a", seed=5))
        await asyncio.sleep(2.5)
        await ward.fleet.update(weights(1), "recompute")
        (busy,) = [e for e in ward.hospital.now.values() if e.active]
        getattr(busy, how)()
        completion = await answer
        assert completion.request_id == "a"
        assert completion.output_ids == [token(5, i) for i in range(500)]
        assert len(completion.logprobs) == len(completion.versions) == 500
        assert completion.versions == sorted(completion.versions)  # those of the first worker as it sampled them
        assert 140 <= Counter(completion.versions)[0] <= 260
        sampled = sum(engine.tokens for engine in ward.hospital.engines)
        assert sampled - 500 <= 160  # a second and a half of work is lost, not all of it

    ward = tended(course, continuing=True)
    assert ward.fleet.moved == 1
    assert ward.fleet.kept >= 100


def test_an_answer_that_moves_twice_keeps_the_tokens_of_both_workers():
    async def course(ward: Ward) -> None:
        ward.hospital.length = lambda _: 600
        answer = asyncio.ensure_future(ward.answer("a", seed=5))
        for _ in range(2):
            await asyncio.sleep(2.5)
            (busy,) = [e for e in ward.hospital.now.values() if e.active]
            busy.die()
        assert (await answer).output_ids == [token(5, i) for i in range(600)]

    ward = tended(course, workers=3, continuing=True)
    assert ward.fleet.moved == 2
    assert ward.fleet.kept >= 200


def test_where_answers_are_of_one_version_one_that_would_mix_two_begins_again():
    async def course(ward: Ward) -> None:
        ward.hospital.length = lambda _: 500
        answer = asyncio.ensure_future(ward.answer("a", seed=5))
        await asyncio.sleep(2.5)
        (busy,) = [e for e in ward.hospital.now.values() if e.active]
        busy.stop()
        await ward.fleet.update(weights(1), "finish")  # the other one takes it meanwhile
        completion = await answer
        assert completion.output_ids == [token(5, i) for i in range(500)]
        assert set(completion.versions) == {1}

    tended(course, continuing=True, one_version=True)


def test_nothing_is_kept_of_a_process_that_had_older_weights_than_it_should():
    async def course(ward: Ward) -> None:
        ward.hospital.length = lambda _: 500
        await ward.fleet.update(weights(2), "recompute")
        answer = asyncio.ensure_future(ward.answer("a", seed=5))
        await asyncio.sleep(0.1)
        (busy,) = [e for e in ward.hospital.now.values() if e.active]
        busy.version = 0
        assert set((await answer).versions) == {2}

    assert tended(course, continuing=True).fleet.kept == 0


# --- coming back ----------------------------------------------------------------------------------------------------


def test_a_restarted_worker_gets_the_current_weights_and_only_then_groups():
    async def course(ward: Ward) -> None:
        await ward.fleet.update(weights(4), "recompute")
        ward.hospital.now["worker-1"].die()
        await ward.until("worker-1", Health.RESYNCING)
        new = ward.hospital.now["worker-1"]
        await ward.until("worker-1", Health.HEALTHY)
        assert new.requests == []
        assert new.served == [0, 4]
        for index in range(20):
            await ward.answer(str(index))
        assert new.requests

    assert tended(course).fleet.restarts == 1


def test_weights_that_change_during_a_resync_are_taken_up_before_the_worker_serves():
    async def course(ward: Ward) -> None:
        ward.hospital.update_seconds = 1.0
        await ward.fleet.update(weights(1), "recompute")
        ward.hospital.now["worker-1"].die()
        await ward.until("worker-1", Health.RESYNCING)
        await asyncio.sleep(0.1)
        await ward.fleet.update(weights(2), "recompute")
        assert ward.fleet.served_version == 2
        await ward.until("worker-1", Health.HEALTHY)
        assert ward.hospital.now["worker-1"].served == [0, 1, 2]

    tended(course)


def test_a_worker_that_hangs_in_its_resync_is_given_up_too():
    async def course(ward: Ward) -> None:
        ward.hospital.update_seconds = 1.0
        await ward.fleet.update(weights(1), "recompute")
        ward.hospital.now["worker-1"].die()
        await ward.until("worker-1", Health.RESYNCING)
        ward.hospital.now["worker-1"].stop()
        await ward.until("worker-1", Health.DEAD)
        await ward.until("worker-1", Health.HEALTHY)

    assert tended(course).fleet.restarts == 2


def test_one_that_comes_back_while_the_fleet_is_paused_stands_still_too():
    async def course(ward: Ward) -> None:
        ward.hospital.now["worker-1"].die()
        await ward.until("worker-1", Health.DEAD)
        await ward.fleet.pause()
        await ward.until("worker-1", Health.HEALTHY)
        answers = [asyncio.ensure_future(ward.answer(str(i))) for i in range(4)]
        await asyncio.sleep(5.0)
        assert not any(answer.done() for answer in answers)
        await ward.fleet.resume()
        await asyncio.gather(*answers)

    tended(course)


def test_a_worker_that_never_starts_is_tried_ever_more_seldom_and_the_others_go_on():
    async def course(ward: Ward) -> None:
        ward.hospital.starts_fail = True
        ward.hospital.now["worker-1"].die()
        await asyncio.sleep(600.0)
        assert (await ward.answer()).output_ids

    assert 10 <= tended(course).fleet.restarts <= 20


def test_a_process_that_was_replaced_behind_our_back_is_known_by_its_version():
    async def course(ward: Ward) -> None:
        await ward.fleet.update(weights(2), "recompute")
        ward.hospital.now["worker-1"].version = 0
        await ward.until("worker-1", Health.DEAD)
        await ward.until("worker-1", Health.HEALTHY)
        assert ward.hospital.now["worker-1"].version == 2

    tended(course)


# --- updates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["die", "stop", "refuse"])
def test_an_update_that_fails_on_a_worker_costs_that_worker_and_nothing_else(how):
    async def course(ward: Ward) -> None:
        engine = ward.hospital.now["worker-1"]
        if how == "refuse":
            engine.refuses_weights = True
        else:
            getattr(engine, how)()
        await ward.fleet.update(weights(1), "recompute")
        assert ward.fleet.served_version == 1
        assert not ward.fleet.workers["worker-1"].health.living
        await ward.until("worker-1", Health.HEALTHY)
        assert ward.hospital.now["worker-1"].version == 1
        assert engine.dead

    tended(course)


def test_a_dead_worker_does_not_hold_the_served_version_back():
    async def course(ward: Ward) -> None:
        ward.hospital.starts_fail = True
        ward.hospital.now["worker-1"].die()
        for version in range(1, 5):
            await ward.fleet.update(weights(version), "recompute")
            assert ward.fleet.served_version == version

    tended(course)


def test_the_served_version_is_that_of_the_slowest_worker_at_every_moment_of_an_update():
    async def course(ward: Ward) -> None:
        first, second = ward.hospital.now["worker-0"], ward.hospital.now["worker-1"]
        assert ward.fleet.served_version == 0
        second.stop()
        updating = asyncio.ensure_future(ward.fleet.update(weights(1), "recompute"))
        await asyncio.sleep(1)
        assert (await first.health(), ward.fleet.served_version) == (1, 0)
        second.go_on()
        await updating
        assert ward.fleet.served_version == 1

    tended(course)


# --- none left ------------------------------------------------------------------------------------------------------


def test_with_no_worker_left_groups_wait_and_the_run_says_so_and_goes_on():
    async def course(ward: Ward) -> None:
        answer = asyncio.ensure_future(ward.answer())
        await asyncio.sleep(0.5)
        for engine in list(ward.hospital.now.values()):
            engine.die()
        await answer
        assert any("no rollout worker is left: waiting up to 600 s" in note for note in ward.notes.notes)

    tended(course)


def test_with_no_worker_for_too_long_the_run_ends_and_says_what_became_of_each():
    async def course(ward: Ward) -> None:
        ward.hospital.starts_fail = True
        for engine in list(ward.hospital.now.values()):
            engine.die()
        await asyncio.sleep(500)

    with pytest.raises(ExceptionGroup) as caught:
        tended(course, no_worker_timeout=60.0)
    assert caught.group_contains(
        RunError, match="no rollout worker for 60 s: worker-0: worker-0 did not come up; worker-1"
    )


def test_without_a_supervisor_the_last_death_ends_the_run_at_once():
    async def main() -> float:
        hospital = Hospital(1)
        fleet = Fleet(list(hospital.now.values()), 0)
        hospital.now["worker-0"].die()
        await fleet.metrics()
        with pytest.raises(ExceptionGroup) as caught:
            await fleet.tend()
        assert caught.group_contains(RunError, match="no rollout worker is left: worker-0: worker-0: connection lost")
        return now()

    assert run_virtual(main()) < 2.0


# --- joining and leaving --------------------------------------------------------------------------------------------


def test_a_worker_that_joins_gets_the_weights_and_then_groups():
    async def course(ward: Ward) -> None:
        await ward.fleet.update(weights(3), "recompute")
        assert ward.fleet.add() == "worker-2"
        await ward.until("worker-2", Health.HEALTHY)
        answers = [ward.answer(str(i)) for i in range(9)]
        assert {v for c in await asyncio.gather(*answers) for v in c.versions} == {3}
        assert ward.hospital.now["worker-2"].requests

    tended(course)


def test_a_worker_that_leaves_ends_what_it_has_and_gets_nothing_new():
    async def course(ward: Ward) -> None:
        answers = [asyncio.ensure_future(ward.answer(str(i))) for i in range(4)]
        await asyncio.sleep(0.5)
        leaving = ward.hospital.now["worker-1"]
        ward.fleet.remove("worker-1")
        answers += [asyncio.ensure_future(ward.answer(str(i))) for i in range(4, 8)]
        await asyncio.gather(*answers)
        await asyncio.sleep(3.0)
        assert set(ward.fleet.states()) == {"worker-0"}
        assert leaving.dead
        assert len(leaving.requests) == 2

    assert tended(course).fleet.moved == 0


def test_a_worker_that_leaves_at_once_hands_its_answers_over_and_no_group_has_lost_a_worker():
    async def course(ward: Ward) -> None:
        answers = [asyncio.ensure_future(ward.answer(str(i))) for i in range(4)]
        await asyncio.sleep(0.5)
        ward.fleet.remove("worker-1", at_once=True)
        await asyncio.gather(*answers)
        await asyncio.sleep(1.0)
        assert set(ward.fleet.states()) == {"worker-0"}

    assert tended(course, losses=1).fleet.moved == 2


def test_a_worker_that_dies_while_it_may_end_its_answers_counts_as_lost_by_their_group():
    """It may be what the group kills workers by, as with one that stays."""

    async def course(ward: Ward) -> None:
        answers = [asyncio.ensure_future(ward.answer(str(i))) for i in range(2)]
        await asyncio.sleep(0.5)
        ward.fleet.remove("worker-1")
        ward.hospital.now["worker-1"].die()
        ended = await asyncio.gather(*answers, return_exceptions=True)
        assert [type(answer) for answer in ended if isinstance(answer, Exception)] == [WorkerLostError]

    assert tended(course, losses=1).fleet.moved == 0


def test_the_last_worker_cannot_leave():
    async def course(ward: Ward) -> None:
        ward.fleet.remove("worker-0")
        with pytest.raises(ValueError, match="worker-1 is the last worker"):
            ward.fleet.remove("worker-1")
        with pytest.raises(ValueError, match="there is no worker worker-9"):
            ward.fleet.remove("worker-9")

    tended(course)


@pytest.mark.parametrize("why", ["starting", "dead", "resyncing"])
def test_nor_can_the_last_that_can_sample_while_others_cannot_yet(why):
    async def course(ward: Ward) -> None:
        match why:
            case "starting":
                ward.fleet.remove("worker-1")
                ward.fleet.add("new")
                await ward.until("new", Health.STARTING)
            case "dead":
                ward.hospital.starts_fail = True
                ward.hospital.now["worker-1"].die()
                await ward.until("worker-1", Health.DEAD)
            case "resyncing":
                ward.hospital.update_seconds = 3.0
                await ward.fleet.update(weights(1), "recompute")
                ward.hospital.now["worker-1"].die()
                await ward.until("worker-1", Health.RESYNCING)
        with pytest.raises(ValueError, match=f"worker-0 is the last worker that can sample: .* is {why}"):
            ward.fleet.remove("worker-0", at_once=True)
        assert ward.fleet.states()["worker-0"] is Health.HEALTHY
        if why == "dead":  # it is nobody's loss
            ward.fleet.remove("worker-1")
        else:
            await ward.until("new" if why == "starting" else "worker-1", Health.HEALTHY)
            ward.fleet.remove("worker-0")

    tended(course)


# --- whole runs -----------------------------------------------------------------------------------------------------


async def misfortune(world: World, hospital: Hospital, seed: int) -> None:
    """Something happens to some worker every few seconds."""
    rng = random.Random(seed)
    while True:
        await asyncio.sleep(rng.expovariate(0.5))
        engine = rng.choice(list(hospital.now.values()))
        match rng.choice(["die", "stop", "moment", "refuse", "add", "remove", "remove at once"]):
            case "die":
                engine.die()
            case "stop":
                engine.stop()
            case "moment":
                engine.stop()
                asyncio.get_running_loop().call_later(rng.uniform(0, 8), engine.go_on)
            case "refuse":
                engine.refuses_weights = True
            case "add" if len(world.fleet.workers) < 5:
                world.fleet.add()
            case removal if len([w for w in world.fleet.workers.values() if not w.leaving]) > 1:
                staying = [name for name, worker in world.fleet.workers.items() if not worker.leaving]
                with suppress(ValueError):  # the last that can sample
                    world.fleet.remove(rng.choice(staying), at_once=removal == "remove at once")


@given(
    st.integers(0, 2**32),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(["disaggregated", "colocated"]),
    st.floats(0.1, 20.0),
    st.booleans(),
)
@settings(max_examples=12)
def test_a_run_under_constant_misfortune_trains_everything_within_eta(
    seed, eta, workers, placement, start_seconds, continuing
):
    async def main() -> tuple[World, Hospital]:
        hospital = Hospital(workers, seed, start_seconds=start_seconds, continuing=continuing)
        notes = Notes()
        health = HealthPolicy(longest_delay=5.0)
        fleet = fleet_of(hospital, notes, FleetPolicy(health=health, losses=50), seed)
        world = World(
            seed,
            eta=eta,
            placement=placement,
            group_size=3,
            train_seconds=2.0,
            group_timeout=1e5,
            fleet=fleet,
            engines=hospital.engines,
        )
        trouble = asyncio.ensure_future(misfortune(world, hospital, seed))
        served = 0

        async def watch() -> None:
            nonlocal served
            while True:
                assert fleet.served_version >= served
                served = fleet.served_version
                # Whatever is remembered of it, this is what it is.
                assert served == min((life.version for life in fleet.lives()), default=fleet.newest_version)
                await asyncio.sleep(0.05)

        watching = asyncio.ensure_future(watch())
        async with asyncio.timeout(50_000):
            await world.controller.run()
        for task in (trouble, watching):
            assert not task.done()
            task.cancel()
        return world, hospital

    world, hospital = run_virtual(main())
    gate = world.controller.gate
    assert world.controller.version == 20
    assert gate.trained == 80
    assert gate.dropped == Counter()
    assert gate.admitted == sum(gate.count(s) for s in State) + gate.trained
    assert max(world.trained().values()) == 1
    assert max(world.staleness()) <= eta
    assert min(world.staleness()) >= 0
    assert hospital.killed
    assert world.fleet.gauges()["fleet/restarts"] == world.fleet.restarts
