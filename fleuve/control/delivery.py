"""New weights on their way to the fleet, and the evaluations between two deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fleuve.config.settings import Settings
from fleuve.contracts import Observer
from fleuve.control.fleet import Fleet
from fleuve.control.gate import Gate
from fleuve.control.reporting import Reporter
from fleuve.control.signal import Signal
from fleuve.types import WeightFile

Evaluation = Callable[[int], Awaitable[dict[str, float]]]
"""Evaluates the version that the fleet serves; metrics by name."""


class Delivery:
    """Brings the newest version to the fleet; a newer one supersedes an older. An evaluation runs between two
    deliveries, and so sees a single version."""

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        fleet: Fleet,
        observer: Observer,
        reporter: Reporter,
        signal: Signal,
        evaluate: Evaluation | None,
        evaluated: int | None,
    ) -> None:
        """`evaluated`: the version of the last evaluation, if there has been one."""
        self.evaluated = evaluated
        self.busy = False
        """An evaluation or a delivery is using the workers."""
        self.held = False
        """Colocated: the trainer has the machine."""
        self._settings = settings
        self._gate = gate
        self._fleet = fleet
        self._observer = observer
        self._reporter = reporter
        self._signal = signal
        self._evaluate = evaluate
        self._newest: WeightFile | None = None

    def offer(self, weights: WeightFile) -> None:
        """These are the newest."""
        self._newest = weights
        self._signal.notify()

    async def run(self) -> None:
        """One of the controller's loops: never returns."""
        while True:
            await self._signal.until(lambda: not self.held and self.due)
            self.busy = True
            if self.evaluation_due:
                await self._run_evaluation()
            if (weights := self._undelivered()) is not None:
                await self._deliver(weights)
            self.busy = False
            self._signal.notify()

    @property
    def due(self) -> bool:
        """There is something to be evaluated or delivered."""
        return self.evaluation_due or self._undelivered() is not None

    @property
    def evaluation_due(self) -> bool:
        """At the first version, every `evaluate.every` steps, and at the last."""
        every, served = self._settings.evaluate.every, self._fleet.served_version
        if self._evaluate is None or not every:
            return False
        last = self.evaluated
        return last is None or served - last >= every or (served == self._settings.steps and last != served)

    def settled(self, version: int) -> bool:
        """It is served and, if it should be, evaluated."""
        return self._fleet.served_version == version and not self.evaluation_due

    def _undelivered(self) -> WeightFile | None:
        newest = self._newest
        return newest if newest is not None and newest.version > self._fleet.served_version else None

    async def _deliver(self, weights: WeightFile) -> None:
        started = self._now()
        self._observer.activity("workers", f"taking version {weights.version}")
        interrupted = await self._fleet.update(weights, self._settings.rollout.interrupt)
        self._gate.serve(weights.version)
        seconds = self._now() - started
        self._reporter.latest["time/weight_sync"] = seconds
        self._observer.activity("workers", f"generating with version {weights.version}")
        self._observer.span(
            "weights", f"version {weights.version}", started, started + seconds, interrupted=interrupted
        )

    async def _run_evaluation(self) -> None:
        assert self._evaluate is not None
        served = self._fleet.served_version
        metrics = await self._evaluate(served)
        self.evaluated = served
        self._reporter.once = metrics
        shown = ", ".join(f"{name} {value:.3f}" for name, value in sorted(metrics.items()))
        self._observer.note(f"evaluation of version {served}: {shown}")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
