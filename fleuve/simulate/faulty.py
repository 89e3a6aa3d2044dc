"""A world in which things go wrong: a rewarder and a trainer that obey `contracts` on virtual time, each with its own
deadlines, and fail as a `faults.Case` says (the rollout workers are in `faulty_engine.py`). What really happened goes
into the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from pathlib import Path

from fleuve.contracts import TrainerError
from fleuve.simulate.faults import Case, Chance
from fleuve.simulate.ledger import Ledger
from fleuve.types import Batch, Prompt, StepResult, Verdict, WeightFile


class FaultyRewarder:
    """Implements `contracts.Rewarder`: never raises, but has no verdict, is late, or says nothing at all."""

    def __init__(self, case: Case, ledger: Ledger, version: int) -> None:
        self._case = case
        self._ledger = ledger
        self._chance = Chance(case, f"rewarder from {version}")
        self._ties = random.Random(f"ties {case.seed}")

    async def score(self, prompt: Prompt, text: str) -> Verdict:
        rates, chance = self._case.rates, self._chance
        if chance.happens(rates.silent):
            self._ledger.saw("verdict: never")
            await asyncio.Event().wait()
        mean = self._case.reward_seconds
        if chance.happens(rates.late):
            self._ledger.saw("verdict: late")
            mean += 1.0
        await asyncio.sleep(chance.seconds(mean)) if mean else await chance.turns()
        if chance.happens(rates.no_verdict):
            self._ledger.saw("verdict: none")
            verdict = Verdict(score=None, reason="the verifier crashed")
        elif chance.happens(rates.nan):
            self._ledger.saw("verdict: NaN")
            verdict = Verdict(score=math.nan)
        else:
            tie = self._ties.random() < self._case.tie_rate
            verdict = Verdict(score=1.0 if tie else float(int(text.split("/")[1]) % 2))
        self._ledger.scored(text, verdict.score)
        return verdict


class FaultyTrainer:
    """Implements `contracts.Trainer`: slow at times, cut short on request, and gone where the case says so."""

    def __init__(self, case: Case, ledger: Ledger, workers_stand: Callable[[], bool], version: int) -> None:
        self.version = version
        self._case = case
        self._ledger = ledger
        self._workers_stand = workers_stand
        self._first = version == 0
        self._chance = Chance(case, f"trainer from {version}")
        self._cut: asyncio.Event | None = None

    async def step(self, batch: Batch) -> StepResult:
        case, chance = self._case, self._chance
        self._ledger.step_begins(batch, self.version, self._workers_stand())
        self._cut = asyncio.Event()
        if self._first and case.failing_step == self.version:
            self._ledger.lost_trainer()
            raise TrainerError("trainer: died during a step")
        mean = case.train_seconds
        if chance.happens(case.rates.slow_step):
            self._ledger.saw("slow step")
            mean *= 10.0
        seconds = chance.seconds(mean)
        if self._first and case.silent_step == self.version:
            self._ledger.lost_trainer()
            seconds = math.inf
        count = len(batch.groups)
        timeout = min(seconds, case.step_timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._cut.wait()
                count = chance.pick(count + 1)
        if seconds > timeout and not self._cut.is_set():
            self._ledger.lost_trainer()
            raise TrainerError(f"trainer: no answer to step {self.version + 1} within {timeout:g} s")
        self._cut = None
        trained = batch.groups[:count]
        if trained:
            self.version += 1
        self._ledger.step_ends(trained, self.version)
        await chance.turns()
        return StepResult(
            version=self.version,
            metrics={"tokens/trained": 1.0},
            advantages=[[None if t.reward is None else 0.0 for t in g.trajectories] for g in batch.groups],
            trained=[g.id for g in trained],
        )

    async def interrupt(self) -> None:
        self._ledger.event("interrupt")
        self._ledger.saw("step cut short")
        if self._cut is not None:
            self._cut.set()

    async def publish(self, served: int) -> WeightFile:
        await asyncio.sleep(self._chance.seconds(self._case.publish_seconds))
        if self._first and self._case.failing_publish == self.version - 1:
            self._ledger.lost_trainer()
            raise TrainerError("trainer: the weights could not be written: no space left")
        return WeightFile(version=self.version, path=f"v{self.version}", bytes=0, checksum="")

    async def save(self, path: Path) -> None: ...

    async def load(self, path: Path) -> None: ...
