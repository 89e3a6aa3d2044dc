"""What a simulation found: the figures of its steady state, and what they come to for the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fleuve.simulate.engine import Usage


@dataclass(frozen=True)
class Totals:
    """The world at the end of a step: everything is counted since the start."""

    seconds: float
    trained_tokens: float
    generated_tokens: float
    usage: Mapping[str, float]
    waited: float
    published: float
    answers: int
    interruptions: int
    answer_seconds: float
    ready_seconds: float
    staleness: Mapping[int, int]
    dropped: Mapping[str, int]

    def since(self, before: Totals) -> Totals:
        """What came after `before`."""
        plain = {
            name: getattr(self, name) - getattr(before, name)
            for name in self.__dataclass_fields__
            if name not in ("usage", "staleness", "dropped")
        }
        return Totals(
            **plain,
            usage={name: value - before.usage.get(name, 0.0) for name, value in self.usage.items()},
            staleness={s: n for s, v in self.staleness.items() if (n := v - before.staleness.get(s, 0))},
            dropped={r: n for r, v in self.dropped.items() if (n := v - before.dropped.get(r, 0))},
        )


@dataclass(frozen=True)
class SimulationResult:
    """A run on virtual time. All but `hours`, `steps` and `simulated` is of the steps after the first `warmup`.

    Times are seconds. Shares of the rollout side are of its engines' time together: `decode`, `prefill` (of prompts),
    `recompute` (of what had been computed before: after new weights, and preemption), `load` (new weights), `idle`
    (nothing to do) and `paused` (the trainer has the machine). Shares of the trainer's time: `train`, `publish`,
    `wait`.
    """

    steps: int
    simulated: int
    warmup: int
    hours: float
    """Predicted for all `steps`: what was simulated, and the others at the mean of the counted ones."""
    step_seconds: float
    step_seconds_min: float
    step_seconds_max: float
    trained_tokens_per_second: float
    """Prompts and answers."""
    generated_tokens_per_second: float
    rollout: dict[str, float]
    trainer: dict[str, float]
    running: float
    """Answers that an engine generates at the same time, in the mean."""
    staleness: dict[int, float]
    """Share of the trained tokens by staleness."""
    staleness_mean: float
    staleness_max: int
    group_seconds: float
    """From a group's admission to its last verdict, in the mean."""
    ready_seconds: float
    """From there to the step that trains it."""
    interruptions: float
    """Of each trained answer, in the mean."""
    interrupted_answers: float
    """Share of the trained answers with tokens of two or more versions."""
    preemptions: float
    """For each trained answer."""
    dropped: dict[str, int]
    engines: int
    wall_seconds: float
    """What the simulation took."""
    caveat: str = ""
    """Why this may not be the steady state; empty if it is."""

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


ROLLOUT_SHARES = ("decode", "prefill", "recompute", "load", "idle", "paused")


def rollout_shares(usage: Mapping[str, float]) -> dict[str, float]:
    """The engines' time, shared out; `usage` is their `Usage` added up."""
    total = sum(usage[name] for name in ("idle", "paused", "decode", "prefill", "load"))
    parts = {**usage, "prefill": usage["prefill"] - usage["recompute"]}
    return {name: parts[name] / total if total else 0.0 for name in ROLLOUT_SHARES}


def added_up(usages: list[Usage]) -> dict[str, float]:
    """All engines together."""
    return {name: float(sum(getattr(u, name) for u in usages)) for name in Usage.__dataclass_fields__}
