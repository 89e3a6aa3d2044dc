"""Which rollout worker gets a group: the one with the fewest answers in flight, ties broken fairly by a seed."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class Router(Generic[W]):
    """Counts the answers that each worker has in flight. All answers of a group go to one worker, which then computes
    their common prompt once. Workers come and go; those that are held back keep their answers and get no new ones."""

    def __init__(self, seed: int) -> None:
        self._in_flight: dict[W, int] = {}
        self._open: dict[W, None] = {}  # a set's order would depend on addresses
        self._random = random.Random(seed)

    @property
    def in_flight(self) -> Mapping[W, int]:
        """Worker → answers in flight."""
        return dict(self._in_flight)

    @property
    def open(self) -> bool:
        """Whether any worker gets new groups."""
        return bool(self._open)

    def join(self, worker: W) -> None:
        """`worker` gets groups from now on: a new one, or one that was held back."""
        self._in_flight.setdefault(worker, 0)
        self._open[worker] = None

    def hold_back(self, worker: W) -> None:
        """No new groups for `worker`."""
        self._open.pop(worker, None)

    def leave(self, worker: W) -> None:
        """`worker` is gone, and what it had in flight with it."""
        self._open.pop(worker, None)
        self._in_flight.pop(worker, None)

    def take(self, answers: int) -> W:
        """Choose a worker for a group of `answers`, and count them as in flight there.

        Raises:
            RuntimeError: none is `open`.
        """
        if not self._open:
            raise RuntimeError("no worker takes new groups")
        least = min(self._in_flight[worker] for worker in self._open)
        worker = self._random.choice([w for w in self._open if self._in_flight[w] == least])
        self._in_flight[worker] += answers
        return worker

    def give_back(self, worker: W, answers: int) -> None:
        """The answers ended, well or badly; of a worker that is gone, nothing is counted."""
        if worker not in self._in_flight:
            return
        if self._in_flight[worker] < answers:
            raise RuntimeError(f"worker {worker} has {self._in_flight[worker]} answers in flight, not {answers}")
        self._in_flight[worker] -= answers
