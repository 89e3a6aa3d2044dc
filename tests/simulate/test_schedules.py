"""Schedule fuzzing: the production controller keeps its promises under every seed, and the fuzzer would notice if it
did not: each mutant below breaks one thing in it on purpose."""

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from fleuve.config.settings import Settings
from fleuve.contracts import RolloutError
from fleuve.control.answers import AnswerBook, Answers
from fleuve.control.begun import Begun
from fleuve.control.caretaker import Caretaker
from fleuve.control.controller import Controller
from fleuve.control.delivery import Delivery
from fleuve.control.gate import Gate
from fleuve.control.journal import Answer, Judged, Step
from fleuve.control.lease import Lease
from fleuve.control.router import Router
from fleuve.control.signal import Signal
from fleuve.control.worker import Life
from fleuve.rollout.workflow import SingleTurn
from fleuve.simulate import fuzz, leg
from fleuve.simulate.faults import Case, draw
from fleuve.simulate.fuzz import play, play_all

SEEDS = 2000
WITHIN = 800
"""Seeds within which a mutant is found; most of them take a handful."""


@pytest.mark.parametrize("part", range(4))
def test_every_promise_is_kept_under_every_schedule(part):
    for outcome in play_all(range(part * SEEDS // 4, (part + 1) * SEEDS // 4)):
        assert not outcome.violation, outcome.explain()


def test_the_schedules_reach_every_kind_of_end_and_every_reason_to_drop_a_group():
    outcomes = [play(seed) for seed in range(200)]
    ends = {end.partition(":")[0] for outcome in outcomes for end in outcome.ended}
    assert ends >= {"done", "stopped", "cancelled", "RunError", "TrainerError"}
    reasons = {reason for outcome in outcomes for reason in outcome.dropped}
    assert reasons >= {"timeout", "rollout failed", "no verdict", "no signal", "overdue"}
    assert sum(len(outcome.ended) == 2 for outcome in outcomes) > 10  # resumed
    assert sum(outcome.restarts for outcome in outcomes) > 10
    assert sum(outcome.kept_tokens for outcome in outcomes) > 0
    assert sum(outcome.handed_on > 0 for outcome in outcomes) > 10


def test_a_seed_replays_exactly_in_any_process():
    seeds = range(30, 60)
    here = [play(seed).digest for seed in seeds]
    assert [play(seed).digest for seed in seeds] == here
    assert len(set(here)) == len(here)
    code = f"from fleuve.simulate.fuzz import play\nprint([play(seed).digest for seed in {seeds!r}])"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        there = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=60
        )
        assert there.stdout.strip() == str(here)


def test_a_failing_seed_prints_its_schedule_what_happened_and_how_to_see_it_again(monkeypatch, capsys):
    one_slot_more(monkeypatch)
    assert fuzz.main(["--seeds", "0..400"]) == 1
    shown = capsys.readouterr().out
    assert "groups are admitted at η = " in shown
    assert "  batch_size = " in shown
    again = next(line for line in shown.splitlines() if line.startswith("again: "))
    assert fuzz.main(again.split()[-2:]) == 1
    assert capsys.readouterr().out == shown


def test_many_seeds_end_with_a_summary(capsys):
    assert fuzz.main(["--seeds", "0..8", "--processes", "2"]) == 0
    assert capsys.readouterr().out.startswith("8 seeds kept every promise")


# --- mutants: one fault each, which must be found -------------------------------------------------------------------

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[tuple[Mutant, str]] = []


def mutant(found_by: str) -> Callable[[Mutant], Mutant]:
    """The fuzzer's complaint has one of these words in it."""

    def add(function: Mutant) -> Mutant:
        MUTANTS.append((function, found_by))
        return function

    return add


def patch(monkeypatch, cls, name, wrapper):
    """Replace a method by `wrapper(original, self, …)`."""
    original = getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda self, *args, **more: wrapper(original, self, *args, **more))


@mutant("admitted")
def one_slot_more(monkeypatch):
    def init(original, self, *args):
        original(self, *args)
        self.slots += 1

    patch(monkeypatch, Gate, "__init__", init)


@mutant("nothing has happened|no step")
def slots_of_dropped_groups_are_lost(monkeypatch):
    def drop(original, self, *args):
        original(self, *args)
        self.slots -= 1

    patch(monkeypatch, Gate, "drop", drop)


@mutant("staleness")
def the_deadline_is_one_version_late(monkeypatch):
    def finish(original, self, group, oldest_version):
        original(self, group, oldest_version + 1)

    patch(monkeypatch, Gate, "finish", finish)


@mutant("staleness")
def no_step_waits_for_a_running_group_at_its_deadline(monkeypatch):
    honest = Case.settings

    def settings(self):
        made = honest(self)
        overdue = "train" if made.control.overdue == "wait" else made.control.overdue
        return made.model_copy(update={"control": made.control.model_copy(update={"overdue": overdue})})

    monkeypatch.setattr(Case, "settings", settings)


@mutant("admitted")
def slots_are_free_before_the_weights_are_served(monkeypatch):
    async def deliver(original, self, weights):
        self._gate.serve(weights.version)
        await original(self, weights)

    patch(monkeypatch, Delivery, "_deliver", deliver)


@mutant("in no step")
def groups_of_an_interrupted_step_are_not_put_back(monkeypatch):
    patch(monkeypatch, Gate, "put_back", lambda original, self, groups: None)


@mutant("trained|vanished")
def an_interrupted_step_counts_as_a_whole_one(monkeypatch):
    def account(original, self, batch, result):
        if result.trained:
            result.trained = [group.id for group in batch.groups]
        original(self, batch, result)

    patch(monkeypatch, Controller, "_account", account)


@mutant("KeyError|not ready|trained again|batch of")
def a_trained_group_is_ready_again(monkeypatch):
    def account(original, self, batch, result):
        original(self, batch, result)
        self._ready.update({group.id: group for group in batch.groups[:1]})

    patch(monkeypatch, Controller, "_account", account)


@mutant("given up at the first failure|lost in the resumption")
def dropped_prompts_are_forgotten(monkeypatch):
    def drop(original, self, group, reason, again=True):
        original(self, group, reason, again=False)

    patch(monkeypatch, Controller, "_drop", drop)


@mutant("twice|the data serves")
def overdue_prompts_are_given_back_twice(monkeypatch):
    def drop(original, self, group, reason, again=True):
        prompt = self._prompts[group]
        original(self, group, reason, again)
        if reason == "overdue":
            self._source._returned.append(prompt.id)

    patch(monkeypatch, Controller, "_drop", drop)


@mutant("nothing has happened|no step")
def a_group_has_no_deadline(monkeypatch):
    monkeypatch.setattr(Settings, "longest_pause", property(lambda self: 1e9))


@mutant("nothing has happened|no step|deadlock")
def only_the_first_that_waits_is_woken(monkeypatch):
    def notify(self):
        for waiter in list(self._waiters)[:1]:
            if not waiter.done():
                waiter.set_result(None)
            del self._waiters[waiter]

    monkeypatch.setattr(Signal, "notify", notify)


@mutant("nothing has happened|no step|ended")
def the_fleet_waits_for_every_version_in_turn(monkeypatch):
    def undelivered(original, self):
        weights = original(self)
        return weights if weights is not None and weights.version == self._fleet.served_version + 1 else None

    patch(monkeypatch, Delivery, "_undelivered", undelivered)


@mutant("not what the worker sampled")
def versions_are_stamped_when_the_answer_comes_back(monkeypatch):
    async def answer(original, self, *args):
        trajectory = await original(self, *args)
        trajectory.versions = trajectory.versions.copy()
        trajectory.versions[:] = trajectory.versions.max()
        return trajectory

    patch(monkeypatch, SingleTurn, "_answer", answer)


@mutant("the reward of")
def no_verdict_counts_as_zero(monkeypatch):
    async def answer(original, self, *args):
        trajectory = await original(self, *args)
        if trajectory.reward is None:
            trajectory.reward = 0.0
        return trajectory

    patch(monkeypatch, SingleTurn, "_answer", answer)


@mutant("in flight")
def the_router_does_not_count_answers_back(monkeypatch):
    patch(monkeypatch, Router, "give_back", lambda original, self, *args: None)


@mutant("an evaluation of version|left over")
def evaluations_run_beside_deliveries(monkeypatch):
    async def evaluate(original, self):
        self._kept = [*getattr(self, "_kept", []), asyncio.get_running_loop().create_task(original(self))]
        self.evaluated = self._fleet.served_version

    patch(monkeypatch, Delivery, "_run_evaluation", evaluate)


@mutant("lost in the resumption|conservation")
def a_checkpoint_forgets_what_is_in_flight(monkeypatch):
    def snapshot(original, self):
        return original(self)[:1]

    patch(monkeypatch, Controller, "snapshot", snapshot)


@mutant("came twice|trained twice|lost in the resumption|KeyError|nothing has happened")
def steps_are_not_written_down(monkeypatch):
    def write(original, self, record):
        if not isinstance(record, Step):
            original(self, record)

    patch(monkeypatch, leg.Journal, "write", write)


@mutant("not what the worker sampled|KeyError")
def replies_are_not_held_against_their_requests(monkeypatch):
    async def generate(self, request):
        completion = await self.call(lambda engine: engine.generate(request))
        completion.request_id = request.request_id
        return completion

    monkeypatch.setattr(Life, "generate", generate)


@mutant("staleness")
def answers_of_a_reborn_worker_are_taken(monkeypatch):
    async def generate(self, request):
        completion = await self.call(lambda engine: engine.generate(request))
        if completion.request_id != request.request_id:
            raise RolloutError("mixed up")
        return completion

    monkeypatch.setattr(Life, "generate", generate)
    patch(monkeypatch, Lease, "_check", lambda original, self, *args: None)


@mutant("not what the worker sampled|read_name|IndexError")
def what_another_worker_had_begun_is_forgotten(monkeypatch):
    patch(monkeypatch, Begun, "ended", lambda original, self, completion: completion)


@mutant("not what the worker sampled")
def what_another_worker_had_begun_is_taken_twice(monkeypatch):
    def follow(original, self, other):
        original(self, other)
        original(self, other)

    patch(monkeypatch, Begun, "follow", follow)


@mutant("sampled again")
def answers_are_not_written_down(monkeypatch):
    def write(original, self, record):
        if not isinstance(record, Answer):
            original(self, record)

    patch(monkeypatch, leg.Journal, "write", write)


@mutant("scored again")
def verdicts_are_not_written_down(monkeypatch):
    def write(original, self, record):
        if not isinstance(record, Judged):
            original(self, record)

    patch(monkeypatch, leg.Journal, "write", write)


@mutant("sampled again")
def answers_of_an_earlier_life_are_not_taken(monkeypatch):
    patch(monkeypatch, Answers, "to", lambda original, self, request: None)


@mutant("sampled again")
def a_checkpoint_forgets_the_answers_of_running_groups(monkeypatch):
    patch(monkeypatch, AnswerBook, "records", lambda original, self: [])


@mutant("staleness")
def tokens_of_an_earlier_life_do_not_count_in_the_deadline(monkeypatch):
    monkeypatch.setattr(Answers, "oldest_version", Answers.newest_version)


@mutant("not what the worker sampled|IndexError|read_name")
def tokens_of_an_earlier_life_are_sent_to_the_worker_and_then_forgotten(monkeypatch):
    async def generate(original, self, request, begun=None):
        completion = await original(self, request, begun)
        if begun:
            for tokens in (completion.output_ids, completion.logprobs, completion.versions):
                del tokens[: len(begun)]
        return completion

    patch(monkeypatch, Lease, "generate", generate)


@mutant("staleness|is served|while workers generate")
def a_restarted_worker_serves_before_it_has_the_newest_weights(monkeypatch):
    async def resync(original, self, life):
        life.version = self._fleet.newest_version

    patch(monkeypatch, Caretaker, "_resync", resync)


@mutant("while workers generate")
def the_trainer_does_not_wait_for_the_workers_to_stand(monkeypatch):
    async def pause(original, self):
        task = asyncio.get_running_loop().create_task(original(self))
        self._kept = [*getattr(self, "_kept", []), task]

    patch(monkeypatch, Controller, "_pause", pause)


@pytest.mark.parametrize(("break_it", "found_by"), MUTANTS, ids=[m.__name__ for m, _ in MUTANTS])
def test_the_fuzzer_finds(break_it, found_by, monkeypatch):
    break_it(monkeypatch)
    found = next((o for o in play_all(range(WITHIN)) if o.violation), None)
    assert found is not None, f"not found within {WITHIN} seeds"
    assert any(word in found.violation for word in found_by.split("|")), found.explain()
    assert play(found.case.seed).digest == found.digest


def test_the_same_case_is_drawn_of_a_seed_every_time():
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({dataclasses.replace(draw(seed), seed=0) for seed in range(50)}) == 50
