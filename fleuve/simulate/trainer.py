"""A trainer that takes its time: the lengths of a batch go to the cost model, its staleness is counted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fleuve.contracts import TrainerError
from fleuve.simulate.staleness import staleness_counts
from fleuve.types import Batch, Group, StepResult, WeightFile


class TrainerTimes(Protocol):
    """What the trainer's work takes: `simulate.trainer_costs.TrainerCosts`, or a test's figures."""

    def step_seconds(self, minibatches: Sequence[Sequence[int]]) -> float: ...

    def publish_seconds(self) -> float: ...


class SimulatedTrainer:
    """Implements `contracts.Trainer`.

    Args:
        learnt: share of the groups that are learnt from (the others' answers all have the same reward), by lot.
        step_timeout: seconds that a step may take, as the real client has it.
    """

    def __init__(
        self,
        times: TrainerTimes,
        minibatches: int,
        max_staleness: int,
        learnt: float = 1.0,
        seed: int = 0,
        step_timeout: float = math.inf,
    ) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        """Tokens of each staleness that were trained so far."""
        self._times = times
        self._minibatches = minibatches
        self._max_staleness = max_staleness
        self._learnt = learnt
        self._random = random.Random(seed)
        self._step_timeout = step_timeout
        self._cut = asyncio.Event()

    async def step(self, batch: Batch) -> StepResult:
        """One step of the cost model's seconds; interrupted, it makes no version.

        Raises:
            TrainerError: it would take too long.
        """
        ends = [len(batch.groups) * i // self._minibatches for i in range(self._minibatches + 1)]
        parts = [batch.groups[start:end] for start, end in itertools.pairwise(ends)]
        seconds = self._times.step_seconds([self._lengths(part) for part in parts])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, self._step_timeout)):
                await self._cut.wait()
        if seconds > self._step_timeout and not self._cut.is_set():
            raise TrainerError(
                f"the trainer: no answer to step {self.version + 1} ({len(batch.groups)} groups) within "
                f"{self._step_timeout:g} s (trainer.step_timeout): it takes {seconds:,.0f} s"
            )
        if self._cut.is_set():
            return StepResult(
                version=self.version, metrics={"tokens/trained": 0.0}, advantages=_no_advantages(batch), trained=[]
            )
        self.version += 1
        return StepResult(
            version=self.version,
            metrics=self._metrics(batch),
            advantages=_no_advantages(batch),
            trained=[g.id for g in batch.groups],
        )

    async def interrupt(self) -> None:
        """End the step in progress."""
        self._cut.set()

    async def publish(self, served: int) -> WeightFile:
        """After the cost model's seconds."""
        await asyncio.sleep(self._times.publish_seconds())
        return WeightFile(version=self.version, path="", bytes=0, checksum="")

    async def save(self, path: Path) -> None:
        """There is nothing to save."""

    async def load(self, path: Path) -> None:
        """Nor to load."""

    def _lengths(self, groups: Sequence[Group]) -> list[int]:
        """Of the sequences of the groups that are learnt from, prompts included."""
        learnt = [g for g in groups if self._learnt >= 1 or self._random.random() < self._learnt]
        return [t.length for g in learnt for t in g.trajectories if t.reward is not None]

    def _metrics(self, batch: Batch) -> dict[str, float]:
        """The real trainer's names."""
        answers = batch.trajectories
        counts = staleness_counts(answers, batch.version)
        self.staleness.update(counts)
        tokens = max(counts.total(), 1)
        overdue = sum(n for stale, n in counts.items() if stale > self._max_staleness)
        return {
            "groups/trained": float(len(batch.groups)),
            "tokens/trained": float(sum(t.length for t in answers)),
            "response/length_mean": counts.total() / max(len(answers), 1),
            "response/length_max": float(max((len(t.output_ids) for t in answers), default=0)),
            "response/truncated": sum(t.finish_reason == "length" for t in answers) / max(len(answers), 1),
            "staleness/mean": sum(stale * n for stale, n in counts.items()) / tokens,
            "staleness/max": float(max(counts, default=0)),
            "staleness/overdue_fraction": overdue / tokens,
        }


def _no_advantages(batch: Batch) -> list[list[float | None]]:
    return [[None] * len(g.trajectories) for g in batch.groups]
