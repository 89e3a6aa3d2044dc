"""Keeps what the controller reports of a simulated run, with the state of the engines at the end of every step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fleuve.simulate.engine import SimulatedEngine
from fleuve.simulate.result import SimulationResult, Totals, added_up, rollout_shares
from fleuve.simulate.timeline import Timeline
from fleuve.simulate.trainer import SimulatedTrainer
from fleuve.simulate.window import Window
from fleuve.types import Batch


class Recorder:
    """Implements `contracts.Observer`. After the last step of `window` it calls `stop`.

    Args:
        progress: is told how many steps are done.
    """

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        trainer: SimulatedTrainer,
        window: Window,
        stop: Callable[[], None],
        trace: Timeline | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.notes: list[str] = []
        self.ends: list[Totals] = [self._totals(engines, trainer, 0.0, None, {}, {})]
        self._engines = engines
        self._trainer = trainer
        self._window = window
        self._stop = stop
        self._trace = trace
        self._progress = progress
        self._interrupted = [0.0]

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        """Keep the totals as of now."""
        now = asyncio.get_running_loop().time()
        self.ends.append(self._totals(self._engines, self._trainer, now, self.ends[-1], metrics, _of(batch, metrics)))
        self._interrupted.append(self._interrupted[-1] + metrics["rollout/interrupted"])
        done = len(self.ends) - 1
        if self._progress is not None:
            self._progress(done)
        if self._window.step(metrics.get("staleness/mean", 0.0)):
            self._stop()

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None:
        if self._trace is not None:
            self._trace.span(track, name, start, end, args)

    def count(self, name: str, value: float, at: float) -> None:
        if self._trace is not None:
            self._trace.count(name, value, at)

    def activity(self, who: str, what: str) -> None:
        """Nobody looks."""

    def note(self, message: str) -> None:
        """Kept."""
        self.notes.append(message)

    def result(self, steps: int, wall_seconds: float) -> SimulationResult:
        """Of the steps that count."""
        simulated = len(self.ends) - 1
        warmup = self._window.warmup
        counted = simulated - warmup
        window = self.ends[-1].since(self.ends[warmup])
        durations = [b.seconds - a.seconds for a, b in zip(self.ends[warmup:], self.ends[warmup + 1 :], strict=False)]
        step_seconds = window.seconds / counted
        tokens = max(sum(window.staleness.values()), 1)
        waited, published = window.waited / window.seconds, window.published / window.seconds
        answers = max(window.answers, 1)
        return SimulationResult(
            steps=steps,
            simulated=simulated,
            warmup=warmup,
            hours=(self.ends[-1].seconds + (steps - simulated) * step_seconds) / 3600,
            step_seconds=step_seconds,
            step_seconds_min=min(durations),
            step_seconds_max=max(durations),
            trained_tokens_per_second=window.trained_tokens / window.seconds,
            generated_tokens_per_second=window.generated_tokens / window.seconds,
            rollout=rollout_shares(window.usage),
            trainer={"train": 1 - waited - published, "publish": published, "wait": waited},
            running=window.usage["answers"] / window.seconds / len(self._engines),
            staleness={s: n / tokens for s, n in sorted(window.staleness.items())},
            staleness_mean=sum(s * n for s, n in window.staleness.items()) / tokens,
            staleness_max=max(window.staleness, default=0),
            group_seconds=window.answer_seconds / counted,
            ready_seconds=window.ready_seconds / counted,
            interruptions=window.interruptions / answers,
            interrupted_answers=(self._interrupted[-1] - self._interrupted[warmup]) / answers,
            preemptions=window.usage["preemptions"] / answers,
            dropped=dict(window.dropped),
            engines=len(self._engines),
            wall_seconds=wall_seconds,
            caveat=self._window.caveat(),
        )

    @staticmethod
    def _totals(
        engines: Sequence[SimulatedEngine],
        trainer: SimulatedTrainer,
        now: float,
        before: Totals | None,
        metrics: dict[str, float],
        batch: dict[str, float],
    ) -> Totals:
        def add(name: str, value: float) -> float:
            return float(getattr(before, name) if before is not None else 0.0) + value

        dropped = {
            n.removeprefix("groups/dropped/"): int(v) for n, v in metrics.items() if n.startswith("groups/dropped/")
        }
        return Totals(
            seconds=now,
            trained_tokens=add("trained_tokens", metrics.get("tokens/trained", 0.0)),
            generated_tokens=float(sum(e.tokens_generated() for e in engines)) if before is not None else 0.0,
            usage=added_up([e.usage_now() for e in engines] if before is not None else []),
            waited=add("waited", metrics.get("time/wait_for_batch", 0.0)),
            published=add("published", metrics.get("time/publish", 0.0)),
            answers=int(add("answers", batch.get("answers", 0))),
            interruptions=int(add("interruptions", batch.get("interruptions", 0))),
            answer_seconds=add("answer_seconds", metrics.get("rollout/group_seconds_mean", 0.0)),
            ready_seconds=add("ready_seconds", batch.get("ready_seconds", 0.0)),
            staleness=dict(trainer.staleness),
            dropped=dropped,
        )


def _of(batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
    """How often its answers were interrupted; how long its groups were ready, in the mean, before they were taken:
    seen from the end of the step, less what came since."""
    now = asyncio.get_running_loop().time()
    taken = now - (metrics["time/step"] - metrics["time/wait_for_batch"])
    trajectories = batch.trajectories
    return {
        "answers": len(trajectories),
        "interruptions": sum(t.interruptions for t in trajectories),
        "ready_seconds": sum(max(0.0, taken - g.finished_at) for g in batch.groups) / max(len(batch.groups), 1),
    }
