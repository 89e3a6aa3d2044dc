"""Which steps of a simulation count: those after the pipeline has filled. A pure state machine."""

from __future__ import annotations

from statistics import fmean

COUNTED = 20
"""Steps of the steady state that are enough, when nobody says."""

LONGEST_PIPELINE = 64
"""Batches that are admitted ahead at most, however stale they may be."""

ENOUGH = 8
"""Steps whose staleness says whether it is steady."""

STEADY, STEADY_SHARE = 0.5, 0.1
"""Versions, or share of the mean, by which staleness differs between the halves of steady steps at most."""


def warmup_steps(max_staleness: int) -> int:
    """Steps after which the pipeline has filled, and all answers do not begin at the same time any more.

    All slots are taken at the start, so that staleness can grow by a version a step until it is `max_staleness`. With
    many slots it may take longer: `Window.caveat` says so.
    """
    return min(max_staleness, LONGEST_PIPELINE) + 4


class Window:
    """Of a run of `steps`, `given` are simulated, or `COUNTED` after the first `warmup`, which do not count.

    Args:
        warmup: `warmup_steps` if not given.
    """

    def __init__(self, max_staleness: int, steps: int, given: int | None = None, warmup: int | None = None) -> None:
        self._steps = steps
        self._warmup = warmup_steps(max_staleness) if warmup is None else warmup
        self._enough = self._warmup + COUNTED
        self._staleness: list[float] = []
        self.last = min(steps, given or self._enough)
        """The step that ends the simulation."""

    def step(self, staleness: float) -> bool:
        """Another step is done, whose tokens were so stale in the mean; whether it was the last."""
        self._staleness.append(staleness)
        return len(self._staleness) >= self.last

    @property
    def warmup(self) -> int:
        """Steps that do not count; none where there are no others."""
        return self._warmup if self._warmup < len(self._staleness) else 0

    def caveat(self) -> str:
        """Why the steps that count may not be those of the steady state; empty if they are, or are the whole run."""
        done = len(self._staleness)
        if done >= self._steps:
            return ""
        if done <= self._warmup:
            return (
                f"these {done} steps are the start of the run, in which the pipeline fills (it takes {self._warmup}), "
                f"and what is said of the other {self._steps - done} is taken from them: for the steady state give "
                f"--simulate.steps {min(self._enough, self._steps)}, or leave it out"
            )
        counted = self._staleness[self._warmup :]
        half = len(counted) // 2
        before, after = fmean(counted[:half] or counted), fmean(counted[half:])
        if len(counted) < ENOUGH or abs(after - before) <= max(STEADY, STEADY_SHARE * before):
            return ""
        return (
            f"staleness was not steady over the steps that count: {before:.1f} in the first half, {after:.1f} in the "
            f"second. The pipeline had not filled after {self._warmup} steps, and later in the run figures differ from "
            "these; more --simulate.steps show it"
        )
