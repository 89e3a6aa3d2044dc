"""The schedule fuzzer would notice if the fleet did not keep its promises: each mutant breaks one thing in it."""

import asyncio
import dataclasses

import msgspec
import pytest
from mutation import Mutants, check_found, into, names, patch

from fleuve.contracts import RolloutError
from fleuve.control import lease
from fleuve.control.begun import Begun
from fleuve.control.caretaker import Caretaker
from fleuve.control.fleet import Fleet
from fleuve.control.health import HealthRecord
from fleuve.control.lease import Lease
from fleuve.control.replies import fault_of
from fleuve.control.router import Router
from fleuve.control.worker import Life

MUTANTS: Mutants = []
mutant = into(MUTANTS)


@mutant("in flight")
def the_router_does_not_count_answers_back(monkeypatch):
    patch(monkeypatch, Router, "give_back", lambda original, self, *args: None)


@mutant("not what the worker sampled|KeyError")
def replies_are_not_held_against_their_requests(monkeypatch):
    async def generate(self, request):
        completion = await self.call(lambda engine: engine.generate(request))
        completion.request_id = request.request_id
        return completion

    monkeypatch.setattr(Life, "generate", generate)


@mutant("staleness|not what the worker sampled|IndexError|tokens, the last of")
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


@mutant("not what the worker sampled|IndexError|read_name", first=110)
def tokens_of_an_earlier_life_are_sent_to_the_worker_and_then_forgotten(monkeypatch):
    async def generate(original, self, request, begun=None):
        completion = await original(self, request, begun)
        if begun:
            for tokens in (completion.output_ids, completion.logprobs, completion.versions):
                del tokens[: len(begun)]
        return completion

    patch(monkeypatch, Lease, "generate", generate)


@mutant("staleness|is served|while workers generate|nothing is wrong|ended for no reason")
def a_restarted_worker_serves_before_it_has_the_newest_weights(monkeypatch):
    async def resync(original, self, life):
        life.version = self._fleet.newest_version

    patch(monkeypatch, Caretaker, "_resync", resync)


@mutant("ended for no reason")
def the_run_does_not_wait_for_a_worker_to_come_back(monkeypatch):
    def init(original, self, *args, policy, **more):
        original(self, *args, policy=dataclasses.replace(policy, no_worker_timeout=0.0), **more)

    patch(monkeypatch, Fleet, "__init__", init)


@mutant("there has been no worker")
def the_run_waits_for_a_worker_for_ever(monkeypatch):
    def init(original, self, *args, policy, **more):
        original(self, *args, policy=dataclasses.replace(policy, no_worker_timeout=1e9), **more)

    patch(monkeypatch, Fleet, "__init__", init)


@mutant("has hung")
def a_worker_that_says_nothing_is_not_given_up(monkeypatch):
    patch(monkeypatch, HealthRecord, "missed", lambda original, self, now: self._suspect())


@mutant("is asked for more", first=390)
def an_answer_that_is_known_as_a_whole_goes_on_elsewhere(monkeypatch):
    def known(original, self, flight):
        begun, part, life, sent = flight.begun, flight.part, flight.life, flight.sent
        if life is not None and not life.distrusted and len(begun) + len(part) == sent.sampling.max_new_tokens:
            return begun.and_then(part)
        return original(self, flight)

    patch(monkeypatch, Lease, "_known", known)


@mutant("nothing is wrong|ended for no reason|staleness|sampled again")
def workers_are_taken_to_have_weights_that_they_are_only_sent(monkeypatch):
    async def update(original, self, weights, interrupt):
        for life in self.lives():
            life.version = weights.version
        return await original(self, weights, interrupt)

    patch(monkeypatch, Fleet, "update", update)


@mutant("left over", first=340)
def probes_of_workers_that_have_left_go_on(monkeypatch):
    async def stop_probing(self):
        for worker in self.workers.values():
            if worker.decision is not None:
                worker.decision.cancel()
                await asyncio.wait([worker.decision])

    monkeypatch.setattr(Fleet, "stop_probing", stop_probing)


@mutant("before it leaves", first=480)
def a_worker_that_leaves_is_ended_with_its_answers(monkeypatch):
    patch(monkeypatch, Caretaker, "_busy", lambda original, self, worker: False)


@mutant("not what the worker sampled|tokens, the last of|IndexError|nothing is wrong")
def whatever_a_worker_hands_in_is_taken(monkeypatch):
    monkeypatch.setattr(lease, "fault_of", lambda *args: "")


@mutant("tokens, the last of|not what the worker sampled", first=130)
def what_had_begun_does_not_count_in_the_length(monkeypatch):
    def fault(completion, request, *more):
        return fault_of(completion, msgspec.structs.replace(request, output_ids=[]), *more)

    monkeypatch.setattr(lease, "fault_of", fault)


@mutant("not what the worker sampled|IndexError|staleness|tokens, the last of|array", first=170)
def what_a_lost_worker_said_of_its_progress_is_taken_as_it_is(monkeypatch):
    def known(original, self, flight):
        known, begun, part = original(self, flight), flight.begun, flight.part
        room = flight.request.sampling.max_new_tokens - len(begun)
        return begun.and_then(part) if 0 < len(part) < room and not flight.life.distrusted else known

    patch(monkeypatch, Lease, "_known", known)


@mutant("has ended")
def a_group_may_lose_any_number_of_workers(monkeypatch):
    def init(original, self, *args, policy, **more):
        original(self, *args, policy=dataclasses.replace(policy, losses=10**9), **more)

    patch(monkeypatch, Fleet, "__init__", init)


@pytest.mark.parametrize(("break_it", "found_by", "first"), MUTANTS, ids=names(MUTANTS))
def test_the_fuzzer_finds(break_it, found_by, first, monkeypatch):
    check_found(break_it, found_by, first, monkeypatch)
