"""One leg of a fuzzed run: the production controller, fleet, workflow, source and journal in a world where things go
wrong, from the beginning or from what an earlier leg has left behind; and how it may end.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass

from fleuve.contracts import RunError, TrainerError
from fleuve.control.controller import Controller
from fleuve.control.dynamic_sampling import AT_LEAST, BATCHES
from fleuve.control.fleet import Fleet, FleetPolicy
from fleuve.control.journal import Record, State, frame, in_turn, unframe
from fleuve.control.past import Past, whole_waves
from fleuve.control.worker import Life
from fleuve.rollout.workflow import SingleTurn
from fleuve.simulate.faults import EVALUATION_SECONDS, MAX_FAILURES, Case, Chance
from fleuve.simulate.faulty import FaultyRewarder, FaultyTrainer
from fleuve.simulate.faulty_engine import FaultyEngine
from fleuve.simulate.faulty_source import Source
from fleuve.simulate.faulty_workers import FaultyWorkers
from fleuve.simulate.ledger import LOSSES, VOCABULARY, Ledger, read_name
from fleuve.simulate.tries import Tries, ViolationError
from fleuve.types import Batch

GIVEN_UP = re.compile(r"is given up \(.*?(silent for|cannot be|update|has weights|connection lost)")
"""What the controller says when it gives a worker up, and why."""

PATIENCE = 30
"""Times the longest wait within which a version must be made: groups may fail, and be tried again."""


class Observer:
    """Puts what the controller reports into the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self._ledger.event("reported", metrics["step"])

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None:
        if end < start:
            raise ViolationError(f"{name} on {track} ended before it began")

    def count(self, name: str, value: float, at: float) -> None: ...

    def activity(self, who: str, what: str) -> None: ...

    def note(self, message: str) -> None:
        self._ledger.event("note", message)
        if why := GIVEN_UP.search(message):
            self._ledger.saw(f"given up: {why[1]}")


@dataclass(frozen=True)
class Saved:
    """A checkpoint of `version`, which holds the groups that `given_up` does not; the next record's number; the answers
    that were `scored`; what the world knows of groups by then."""

    version: int
    records: list[Record]
    given_up: set[str]
    next: int
    scored: frozenset[str]
    tries: Tries


class Journal:
    """In memory, as msgpack, like what comes back from a file."""

    def __init__(self, first: int, ledger: Ledger) -> None:
        self.first = first
        self.frames: list[bytes] = []
        self._ledger = ledger

    @property
    def next(self) -> int:
        """The number of the next record."""
        return self.first + len(self.frames)

    def write(self, record: Record) -> None:
        self.frames.append(frame(record, self.next))
        self._ledger.wrote(record)

    def since(self, number: int) -> Iterator[Record]:
        """The records from `number` on."""
        return in_turn(unframe(self.frames), number)


class Leg:
    """One controller's life: from the beginning, or from a checkpoint."""

    journal: Journal
    ledger: Ledger

    def __init__(self, case: Case, earlier: Leg | None = None, saved: Saved | None = None) -> None:
        self.case = case
        self.ledger: Ledger
        self.journal: Journal
        self.source = source = Source(case)
        past, tries = Past(source), None
        settings = case.settings()
        if earlier is not None and saved is not None:
            for record in saved.records:
                past.apply(record)
            written = list(earlier.journal.since(saved.next)) if case.resume == "journal" else []
            if settings.reproducible:
                written = list(whole_waves(written, past.running))
            for record in written:
                past.apply(record)
            tries = saved.tries.next_life(written)
        start = past.version
        scored = saved.scored if saved is not None else frozenset()
        if earlier is not None and case.resume == "journal":
            scored = earlier.ledger.have_scores
        self.ledger = Ledger(case, past, earlier.ledger if earlier else None, scored, tries)
        self.handed_on = sum(answers.tokens for answers in past.answers.values())
        source.world = self
        observer = Observer(self.ledger)
        self.journal = Journal(earlier.journal.next if earlier else 0, self.ledger)
        self.checkpoints: list[Saved] = []
        self.workers = FaultyWorkers(case, self.ledger, start)
        self.trainer = FaultyTrainer(case, self.ledger, self._workers_stand, start)
        self.fleet = Fleet(
            list(self.workers.engines.values()),
            case.seed,
            start,
            supervisor=self.workers if case.supervised else None,
            policy=FleetPolicy(
                no_worker_timeout=case.no_worker_timeout, losses=LOSSES, one_version=case.interrupt == "finish"
            ),
            observer=observer,
            vocabulary=VOCABULARY,
        )
        self.controller = Controller(
            settings,
            source,
            SingleTurn(settings.rollout, case.seed, read_name, FaultyRewarder(case, self.ledger, start)),
            self.fleet,
            self.trainer,
            observer,
            evaluate=self._evaluate if case.evaluate_every else None,
            checkpoint=self._checkpoint,
            journal=self.journal,
            past=past,
        )
        self.ledger.resumes(self.controller.gate)
        self._none_since = math.inf
        self._back_at: float | None = -math.inf  # None while there is no worker
        """When the last living worker was given up; None while there is one."""

    def sampled(self) -> set[int]:
        """The versions of the workers that the fleet takes answers from. One that is reborn is found out by and by; of
        its answers none may be taken, which is seen where they are trained."""
        return {max(life.version, engine.version) for life, engine in self._living()}

    def _workers_stand(self) -> bool:
        return all(engine.standing for _, engine in self._living() if engine.known)

    def _living(self) -> list[tuple[Life, FaultyEngine]]:
        return [(life, life.engine) for life in self.fleet.lives() if isinstance(life.engine, FaultyEngine)]

    async def run(self) -> str:
        """Play it, check it; how it ended.

        Raises:
            ViolationError: a promise was broken.
        """
        others = asyncio.all_tasks()
        run = asyncio.create_task(self.controller.run())
        hand = asyncio.create_task(self._meddle(run))
        watches = [asyncio.create_task(watch) for watch in self._watches()]
        try:
            await asyncio.wait([run, *watches], return_when=asyncio.FIRST_COMPLETED)
            for watch in watches:
                if watch.done():
                    watch.result()
            ended = self._how_it_ended(run)
        finally:
            for task in (run, hand, *watches):
                task.cancel()
            self.workers.close()
            await asyncio.wait([hand, *watches])
        await asyncio.sleep(0)
        self._check_quiet(others)
        self.ledger.check_end(self.controller)
        return ended

    def save(self) -> Saved:
        """What a checkpoint would keep now."""
        controller = self.controller
        records = controller.snapshot()
        state = records[0]
        assert isinstance(state, State)
        return Saved(
            controller.version,
            records,
            self.given_up(),
            state.next,
            self.ledger.have_scores,
            self.ledger.tries.next_life(),
        )

    def given_up(self) -> set[str]:
        """Prompts that come no more in this leg, and were not trained."""
        return self.ledger.given_up(self.controller.pending())

    async def _meddle(self, run: asyncio.Task[None]) -> None:
        """What comes from outside: Ctrl-C, its grace's end, a cancellation."""
        case = self.case
        if self.ledger.start:
            return
        if case.stop_at is not None:
            await asyncio.sleep(case.stop_at)
            self.ledger.event("stop")
            self.controller.stop()
            if case.cut_after is not None:
                await asyncio.sleep(case.cut_after)
                await self.trainer.interrupt()
        elif case.cancel_at is not None:
            await asyncio.sleep(case.cancel_at)
            self.ledger.event("cancel")
            run.cancel()

    def _watches(self) -> list[Coroutine[None, None, None]]:
        """None of which ends, but in an error."""
        return [self._watch(), self._watch_workers(), self._change_workers(), self._complain()]

    async def _complain(self) -> None:
        raise ViolationError(await self.workers.complaint)

    async def _watch(self) -> None:
        """Invariant 7: something happens within the longest wait, a version is made within `PATIENCE` of them."""
        gate = self.controller.gate
        before, version, since_version = (-1, 0, 0, 0), -1, 0
        while True:
            await asyncio.sleep(self.case.longest_wait)
            now = (gate.admitted, gate.trained, gate.dropped.total(), len(self.ledger.events))
            if now == before:
                raise ViolationError(f"nothing has happened for {self.case.longest_wait:g} s: {self._waits()}")
            since_version = since_version + 1 if self.controller.version == version else 0
            if since_version > PATIENCE:
                raise ViolationError(f"no step for {PATIENCE * self.case.longest_wait:g} s: {self._waits()}")
            before, version = now, self.controller.version

    async def _watch_workers(self) -> None:
        """Without any living worker the run waits for so long, and no longer."""
        fleet, limit = self.fleet, self.case.no_worker_timeout if self.case.supervised else 0.0
        loop = asyncio.get_running_loop()
        while True:
            await fleet.changed.until(lambda: not fleet.lives())
            if self._back_at != loop.time():  # one that came and went in the same instant was none
                self._none_since = loop.time()
            self._back_at = None
            with suppress(TimeoutError):
                async with asyncio.timeout(limit + 5.0):
                    await fleet.changed.until(lambda: bool(fleet.lives()))
                    self._back_at = loop.time()
            if self._back_at is None:
                raise ViolationError(f"there has been no worker for {limit + 5.0:g} s, and the run goes on")

    async def _change_workers(self) -> None:
        """Workers join and leave, in the first leg."""
        loop, case = asyncio.get_running_loop(), self.case
        chance = Chance(case, "changes")
        for change in case.changes if not self.ledger.start else ():
            await asyncio.sleep(max(0.0, change.at - loop.time()))
            staying = [name for name, worker in self.fleet.workers.items() if not worker.leaving]
            if change.kind == "add" and len(staying) < 4:
                self.ledger.event("added", self.fleet.add())
            elif change.kind != "add" and len(staying) > 1:
                worse = [name for name in staying if self.workers.is_wrong(name)] or staying
                name = worse[chance.pick(len(worse))]
                try:
                    self.fleet.remove(name, at_once=change.kind == "at once")
                except ValueError:
                    if {life.name for life in self.fleet.lives()}.intersection(staying) - {name}:
                        raise ViolationError(f"{name} may not leave, though others are there") from None
                    continue
                self.workers.remove(name, change.kind)
            else:
                continue
            self.ledger.saw(change.kind)
        await asyncio.Event().wait()

    def _waits(self) -> str:
        gate = self.controller.gate
        return f"version {self.controller.version}, {gate.free} slots free, {dict(gate.dropped)} dropped"

    def _how_it_ended(self, run: asyncio.Task[None]) -> str:
        """Done, or with an error that says what happened, and only if something went wrong."""
        case, ledger = self.case, self.ledger
        if run.cancelled():
            if case.cancel_at is None:
                raise ViolationError("the run was cancelled by nobody")
            return "cancelled"
        error = run.exception()
        if error is None:
            if ledger.trainer_lost:
                raise ViolationError("the trainer was lost, and the run does not say so")
            if self.controller.version == case.steps:
                if self.sampled() - {case.steps} and case.stop_at is None:
                    raise ViolationError(f"the run ended at version {case.steps}, but {self.sampled()} is served")
                return "done"
            if case.stop_at is None or ledger.start:
                raise ViolationError(f"the run ended at version {self.controller.version} of {case.steps}")
            return "stopped"
        leaves = sorted(_leaves(error), key=lambda leaf: not isinstance(leaf, ViolationError))
        for leaf in leaves:
            if not isinstance(leaf, (RunError, TrainerError)):
                raise leaf
            if not self._had_to_come(str(leaf)):
                raise ViolationError(f"the run ended for no reason with {leaf!r}")
        return "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves)

    def _had_to_come(self, error: str) -> bool:
        """Whether what went wrong, as the world knows it, is this, and enough of it to end a run."""
        case, tries = self.case, self.ledger.tries
        for what in ("no rollout worker is left", "no rollout worker for", "prompts in a row failed", "had no signal"):
            if what in error:
                self.ledger.saw(what)
        if error.startswith("trainer: "):
            return self.ledger.trainer_lost
        if error.startswith("no rollout worker is left"):
            return not case.supervised and all(engine.wrong for engine in self.workers.engines.values())
        if error.startswith("no rollout worker"):
            now = asyncio.get_running_loop().time()
            none = self._back_at in (None, now) and now - self._none_since > case.no_worker_timeout - 1e-6
            return case.supervised and none
        if "prompts in a row failed" in error:
            # The last is not written down, and others may come through while the run ends.
            now = asyncio.get_running_loop().time()
            return len(tries.failed) == MAX_FAILURES - 1 or self.ledger.escaped_at == now
        limit = max(BATCHES * case.batch_size, AT_LEAST)
        return "had no signal" in error and case.dynamic_sampling and tries.without_signal == limit - 1

    def _check_quiet(self, others: set[asyncio.Task[object]]) -> None:
        """Nothing goes on after the end."""
        if left := [t for t in asyncio.all_tasks() - others if t is not asyncio.current_task()]:
            raise ViolationError(f"tasks are left over: {left}")
        if busy := [e.name for e in (*self.workers.engines.values(), *self.workers.gone) if e.busy]:
            raise ViolationError(f"{busy} are still asked for answers that nobody waits for")
        if in_flight := {w: n for w, n in self.fleet.router.in_flight.items() if n}:
            raise ViolationError(f"answers are still counted as in flight: {in_flight}")

    async def _evaluate(self, version: int) -> dict[str, float]:
        began = self.sampled()
        await asyncio.sleep(EVALUATION_SECONDS * random.Random(version).random())
        ended = self.sampled()
        self.ledger.event("evaluated", version)
        if (began | ended) - {version}:
            raise ViolationError(f"an evaluation of version {version} saw {began}, then {ended}")
        return {"eval/test/pass@1": 0.5}

    async def _checkpoint(self, version: int) -> None:
        if version != self.trainer.version:
            raise ViolationError(f"a checkpoint of version {version} of a trainer at {self.trainer.version}")
        self.checkpoints.append(self.save())
        await asyncio.sleep(0.05)
        self.ledger.event("saved", version)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
