"""Which rollout worker gets a group: the one with the fewest answers in flight, ties broken fairly by a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping


class Router:
    """Counts the answers that each worker has in flight. All answers of a group go to one worker, which then
    computes their common prompt once."""

    def __init__(self, workers: int, seed: int) -> None:
        self._in_flight = [0] * workers
        self._random = random.Random(seed)

    @property
    def in_flight(self) -> Mapping[int, int]:
        """Worker → answers in flight."""
        return dict(enumerate(self._in_flight))

    def take(self, answers: int) -> int:
        """Choose a worker for a group of `answers`, and count them as in flight there."""
        least = min(self._in_flight)
        worker = self._random.choice([w for w, n in enumerate(self._in_flight) if n == least])
        self._in_flight[worker] += answers
        return worker

    def give_back(self, worker: int, answers: int) -> None:
        """The answers ended, well or badly."""
        if self._in_flight[worker] < answers:
            raise RuntimeError(f"worker {worker} has {self._in_flight[worker]} answers in flight, not {answers}")
        self._in_flight[worker] -= answers
