"""How stale the tokens of a batch are, counted without looking at each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from fleuve.types import Int32Array, Trajectory


def staleness_counts(trajectories: Iterable[Trajectory], version: int) -> Counter[int]:
    """Staleness, in versions before `version`, to sampled tokens.

    The versions along an answer never go down, so where each begins is found by bisection.
    """
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        for sampled_by, tokens in _spans(trajectory.versions):
            counts[version - sampled_by] += tokens
    return counts


def _spans(versions: Int32Array) -> list[tuple[int, int]]:
    """(version, tokens) along one answer."""
    if not len(versions):
        return []
    first, last = int(versions[0]), int(versions[-1])
    if first == last:
        return [(first, len(versions))]
    ends = np.searchsorted(versions, np.arange(first, last + 1), side="right").tolist()
    starts = [0, *ends[:-1]]
    return [(first + i, end - start) for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]
