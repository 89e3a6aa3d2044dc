"""The analytic half of `fleuve plan`: which candidates fit, and which of them look fastest."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from fleuve.config.settings import Settings
from fleuve.simulate.candidates import Candidate, Misfit, candidates, longest_sequence, misfit
from fleuve.simulate.estimate import Estimate, Work, bound, estimate


@dataclass(frozen=True)
class Screened:
    """A candidate that fits, the run that follows it, and what arithmetic says of it."""

    candidate: Candidate
    settings: Settings
    estimate: Estimate


def fitting(settings: Settings, most_stale: int) -> tuple[list[tuple[Candidate, Settings]], Misfit | None]:
    """The candidates that fit into memory; if there are none, why the nearest does not."""
    fit, nearest = [], None
    for candidate in candidates(settings, most_stale):
        run = candidate.apply(settings)
        problem = misfit(run)
        if problem is None:
            fit.append((candidate, run))
        elif nearest is None or problem.factor < nearest.factor:
            nearest = problem
    return fit, (None if fit else nearest)


def fits(settings: Settings) -> bool:
    """Whether there is any candidate that fits: one with the least memory for each layout is enough to know."""
    longest = longest_sequence(settings)
    return any(
        misfit(candidate.apply(settings)) is None
        for candidate in candidates(settings, 1)
        if candidate.recompute_activations and candidate.token_budget == longest
    )


def screen(fit: list[tuple[Candidate, Settings]], work: Work, count: int) -> list[Screened]:
    """The `count` fastest by estimate, each of another split of the devices, the fastest first.

    A fast bound below the estimate says in which order to look, and when to stop: none that is left can be better.
    """
    queue = [(bound(run, work).step, i) for i, (_, run) in enumerate(fit)]
    heapq.heapify(queue)
    best: dict[int | None, Screened] = {}
    while queue:
        least, i = heapq.heappop(queue)
        ranked = sorted(s.estimate.step for s in best.values())
        if len(ranked) >= count and least >= ranked[count - 1]:
            break
        candidate, run = fit[i]
        found = Screened(candidate, run, estimate(run, work))
        known = best.get(candidate.rollout_gpus)
        if known is None or found.estimate.step < known.estimate.step:
            best[candidate.rollout_gpus] = found
    return sorted(best.values(), key=lambda s: s.estimate.step)[:count]
