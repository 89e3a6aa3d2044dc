"""What a step's row of metrics says of the controller: its ledger, the groups that finished, the latest counters."""

from __future__ import annotations

import asyncio
from collections import Counter

from fleuve.contracts import Observer
from fleuve.control.fleet import Fleet
from fleuve.control.gate import Gate, State
from fleuve.control.summary import rollout_metrics
from fleuve.types import Batch, Group, StepResult


class Reporter:
    """Gathers metrics between steps and hands them to the observer with each.

    `latest` is shown with every step until there is a newer value, `once` with the next step only.
    """

    def __init__(self, observer: Observer, gate: Gate) -> None:
        self.latest: dict[str, float] = {}
        self.once: dict[str, float] = {}
        self._observer = observer
        self._gate = gate
        self._finished: Counter[str] = Counter()  # what came through since the last step
        self._reward_sum = 0.0

    def finished(self, group: Group, signal: bool) -> None:
        """A group came through, to be trained or, for want of `signal`, dropped."""
        rewards = [t.reward for t in group.trajectories if t.reward is not None]
        self._finished.update(groups=1, no_signal=not signal, answers=len(rewards))
        self._reward_sum += sum(rewards)

    def step(self, batch: Batch, result: StepResult, times: dict[str, float]) -> None:
        """Fill in the advantages and report the step and what it trained; `times` are seconds, `time/step` among
        them."""
        for group, advantages in zip(batch.groups, result.advantages, strict=True):
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
                trajectory.advantage = advantage
        trained = set(result.trained)
        batch = Batch(version=batch.version, groups=[group for group in batch.groups if group.id in trained])
        metrics = {
            "step": float(result.version),
            "policy_version": float(result.version),
            **result.metrics,
            **rollout_metrics(batch),
            **self._finished_metrics(),
            "rollout/running": float(self._gate.count(State.RUNNING)),
            "rollout/ready": float(self._gate.count(State.READY)),
            "groups/dropped": float(self._gate.dropped.total()),
            **{f"groups/dropped/{reason.replace(' ', '_')}": float(n) for reason, n in self._gate.dropped.items()},
            **times,
            "throughput/trained_tokens_per_second": result.metrics["tokens/trained"] / max(times["time/step"], 1e-9),
            **self.latest,
            **self.once,
        }
        self.once = {}
        self._observer.step(metrics, batch)

    def _finished_metrics(self) -> dict[str, float]:
        """`rollout/reward_mean` is what the policy really scores: `reward/mean`, of the trained groups, is biased
        towards the middle where groups without signal are replaced. Nothing if no group has finished since the last
        step."""
        counts, reward_sum = self._finished, self._reward_sum
        self._finished, self._reward_sum = Counter(), 0.0
        if not counts["answers"]:
            return {}
        return {
            "rollout/reward_mean": reward_sum / counts["answers"],
            "rollout/no_signal_fraction": counts["no_signal"] / counts["groups"],
        }

    async def watch(self, fleet: Fleet) -> None:
        """One of the controller's loops: the workers' counters and the gate's, once a second. Never returns."""
        before = 0.0
        while True:
            counters = await fleet.metrics()
            now, generated = asyncio.get_running_loop().time(), counters["tokens_generated"]
            self.latest["tokens/generated"] = generated
            self._observer.count("throughput/generated_tokens_per_second", generated - before, now)
            self._observer.count("rollout/running", self._gate.count(State.RUNNING), now)
            self._observer.count("rollout/ready", self._gate.count(State.READY), now)
            before = generated
            await asyncio.sleep(1.0)
