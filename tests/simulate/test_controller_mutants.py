"""The schedule fuzzer would notice if the controller did not keep its promises: each mutant breaks one thing in it."""

import asyncio

import pytest
from mutation import Mutants, check_found, into, names, one_slot_more, patch

from fleuve.config.settings import Settings
from fleuve.control.answers import AnswerBook, Answers
from fleuve.control.controller import Controller
from fleuve.control.delivery import Delivery
from fleuve.control.failures import Failures
from fleuve.control.gate import Gate, State
from fleuve.control.journal import Answer, Judged, Step
from fleuve.control.schedule import Schedule
from fleuve.control.signal import Signal
from fleuve.rollout.workflow import SingleTurn
from fleuve.simulate import leg
from fleuve.simulate.faults import Case

MUTANTS: Mutants = []
mutant = into(MUTANTS)


mutant("admitted")(one_slot_more)


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


@mutant("came twice|trained twice|lost in the resumption|KeyError|nothing has happened|ready since version")
def steps_are_not_written_down(monkeypatch):
    def write(original, self, record):
        if not isinstance(record, Step):
            original(self, record)

    patch(monkeypatch, leg.Journal, "write", write)


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


@mutant("staleness|has time until")
def tokens_of_an_earlier_life_do_not_count_in_the_deadline(monkeypatch):
    monkeypatch.setattr(Answers, "oldest_version", Answers.newest_version)


@mutant("while workers generate")
def the_trainer_does_not_wait_for_the_workers_to_stand(monkeypatch):
    async def pause(original, self):
        task = asyncio.get_running_loop().create_task(original(self))
        self._kept = [*getattr(self, "_kept", []), task]

    patch(monkeypatch, Controller, "_pause", pause)


@mutant("ended for no reason")
def failures_in_a_row_go_on_after_a_success(monkeypatch):
    patch(monkeypatch, Failures, "succeeded", lambda original, self, prompt: self._attempts.pop(prompt, None))


@mutant("ready since version")
def the_newest_groups_are_trained_first_unless_steps_wait(monkeypatch):
    def next_batch(original, self, version, batch_size, *, wait):
        batch = original(self, version, batch_size, wait=wait)
        if wait or batch is None:
            return batch
        return [group for deadline in sorted(self._ready, reverse=True) for group in self._ready[deadline]][:batch_size]

    patch(monkeypatch, Schedule, "next_batch", next_batch)


@mutant("tried again", first=150)
def failed_tries_of_an_earlier_life_are_forgotten(monkeypatch):
    def init(original, self, *args, **more):
        original(self, *args, **more)
        self._failures = Failures()

    patch(monkeypatch, Controller, "__init__", init)


@mutant("dropped for no reason|nothing has happened|no step|ready since", first=830)
def the_deadline_of_a_ready_group_is_that_of_its_admission(monkeypatch):
    patch(monkeypatch, Gate, "finish", lambda original, self, group, oldest_version: original(self, group, 0))


@mutant("too late for the step", first=170)
def running_groups_that_come_too_late_run_on(monkeypatch):
    def overdue(original, self, version, ids):
        return [group for group in original(self, version, ids) if self._states[group] is State.READY]

    patch(monkeypatch, Gate, "overdue", overdue)


@pytest.mark.parametrize(("break_it", "found_by", "first"), MUTANTS, ids=names(MUTANTS))
def test_the_fuzzer_finds(break_it, found_by, first, monkeypatch):
    check_found(break_it, found_by, first, monkeypatch)
