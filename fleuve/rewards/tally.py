"""What a rewarder has done so far, as numbers for a row of metrics."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

REASONS = ("timeout", "crash", "error", "queue", "unreachable")
"""Why there is no verdict: over the deadline; its process crashed; the verifier or the row is faulty; no process was
free in time; the service could not be reached."""
WINDOW = 1000
"""Checks that means and percentiles are over: the latest."""


class Tally:
    """Counts since the start; seconds of the latest `WINDOW` checks."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._check_seconds: deque[float] = deque(maxlen=WINDOW)
        self._queue_seconds: deque[float] = deque(maxlen=WINDOW)

    def scored(self, seconds: float) -> None:
        """A check ended in a score; it ran for `seconds`."""
        self.counts["scored"] += 1
        self._check_seconds.append(seconds)

    def no_verdict(self, reason: str, seconds: float) -> None:
        """A check ended without; `reason` is one of `REASONS`."""
        self.counts[reason] += 1
        if seconds:
            self._check_seconds.append(seconds)

    def queued(self, seconds: float) -> None:
        """A check waited for `seconds` before a process took it up."""
        self._queue_seconds.append(seconds)

    def metrics(self) -> dict[str, float]:
        """`reward_service/...`."""
        without = sum(self.counts[reason] for reason in REASONS)
        values = {
            "checks": float(self.counts["scored"] + without),
            "no_verdict": float(without),
            **{f"no_verdict/{reason}": float(self.counts[reason]) for reason in REASONS},
            "seconds_mean": mean(self._check_seconds),
            "seconds_p99": percentile(self._check_seconds, 0.99),
            "queue_seconds_mean": mean(self._queue_seconds),
            "queue_seconds_p99": percentile(self._queue_seconds, 0.99),
            "replaced": float(self.counts["replaced"]),
            "recycled": float(self.counts["recycled"]),
        }
        return {f"reward_service/{name}": value for name, value in values.items()}


def mean(values: Sequence[float]) -> float:
    """0 of nothing."""
    return sum(values) / max(1, len(values))


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that `fraction` of them do not exceed; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0
