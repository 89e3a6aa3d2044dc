"""Which rollout worker gets a group: of those with room in their caches, the one with the fewest tokens in flight.

An answer weighs its prompt and as many tokens as answers have had so far; it is given back when it ends, not when its
group does, so that a worker left with one straggler is all but free. Ties are broken fairly, by a seed. A worker whose
cache is under pressure gets no new group while another has room and is hardly heavier; when all are under pressure the
lightest gets it: nobody waits on account of this.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)

HIGH, LOW = 0.95, 0.85
"""Shares of a cache in use at which pressure begins, and ends."""
STRETCH = 1.25
"""How many times as heavy as the lightest a worker may be that is preferred to those under pressure. What is known of
caches is a second old: without a bound, all groups that come at the end of a step would go to the few that had room."""
DOUBT = 8.0
"""As many answers as the assumption weighs that answers are as long as they may be."""
MEMORY = 0.999
"""What an answer's length counts for when one more has come: answers change while a policy learns."""


@dataclass(slots=True)
class _Load:
    answers: int = 0
    tokens: int = 0


@dataclass(eq=False, slots=True)
class Seat(Generic[W]):
    """What a group holds of the router: `answers` counted on `worker`, each for `tokens`."""

    worker: W
    answers: int
    tokens: int


class Router(Generic[W]):
    """All answers of a group go to one worker, which then computes their common prompt once. Workers come and go; those
    that are held back keep their answers and get no new groups."""

    def __init__(self, seed: int) -> None:
        self._loads: dict[W, _Load] = {}
        self._open: dict[W, None] = {}  # a set's order would depend on addresses
        self._pressed: set[W] = set()
        self._random = random.Random(seed)

    @property
    def in_flight(self) -> Mapping[W, int]:
        """Worker → answers in flight."""
        return {worker: load.answers for worker, load in self._loads.items()}

    @property
    def open(self) -> bool:
        """Whether any worker gets new groups."""
        return bool(self._open)

    def busy(self, worker: W) -> bool:
        """Whether `worker` has answers in flight."""
        load = self._loads.get(worker)
        return load is not None and load.answers > 0

    def join(self, worker: W) -> None:
        """`worker` gets groups from now on: a new one, or one that was held back."""
        self._loads.setdefault(worker, _Load())
        self._open[worker] = None

    def hold_back(self, worker: W) -> None:
        """No new groups for `worker`."""
        self._open.pop(worker, None)

    def leave(self, worker: W) -> None:
        """`worker` is gone, and what it had in flight with it."""
        self._open.pop(worker, None)
        self._loads.pop(worker, None)
        self._pressed.discard(worker)

    def press(self, worker: W, pressed: bool) -> None:
        """Whether `worker`'s cache is under pressure, from now on."""
        if pressed and worker in self._loads:
            self._pressed.add(worker)
        else:
            self._pressed.discard(worker)

    def take(self, answers: int, tokens: int) -> Seat[W]:
        """Choose a worker for a group of `answers`, each expected to be of `tokens`, and count them there.

        Raises:
            RuntimeError: none is `open`.
        """
        if not self._open:
            raise RuntimeError("no worker takes new groups")
        weights = {worker: self._loads[worker].tokens for worker in self._open}  # one look at each, once a group
        least = min(weights.values())
        if self._pressed:
            roomy = {w: n for w, n in weights.items() if w not in self._pressed and n <= least * STRETCH}
            weights = roomy or weights
            least = min(weights.values())
        seat = Seat(self._random.choice([w for w, n in weights.items() if n == least]), 0, tokens)
        self.add(seat, answers)
        return seat

    def add(self, seat: Seat[W], answers: int) -> None:
        """So many more are in flight where the group is."""
        seat.answers += answers
        load = self._loads.get(seat.worker)
        if load is not None:
            load.answers += answers
            load.tokens += answers * seat.tokens

    def give_back(self, seat: Seat[W], answers: int) -> None:
        """So many of them ended, well or badly; of a worker that is gone, nothing is counted.

        Raises:
            RuntimeError: there are not that many.
        """
        if seat.answers < answers:
            raise RuntimeError(f"a group has {seat.answers} answers in flight on {seat.worker}, not {answers}")
        self.add(seat, -answers)


class Pressure:
    """Whether a worker's cache is full, from what its metrics say once a second: `kv_cache_use`, a share; and
    `preemptions`, a counter, which only goes up where there was no room. Workers that tell neither never are."""

    def __init__(self) -> None:
        self.pressed = False
        self._preemptions = 0.0

    def look(self, metrics: Mapping[str, float]) -> bool:
        """The state by what `metrics` say now."""
        preempted = metrics.get("preemptions", 0.0)
        use = metrics.get("kv_cache_use", 0.0)
        self.pressed = preempted > self._preemptions or use >= (LOW if self.pressed else HIGH)
        self._preemptions = preempted
        return self.pressed


class ExpectedLength:
    """The mean length of the answers of late, in tokens; before there are any, as long as they may be."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0

    def ended(self, tokens: int) -> None:
        """An answer came to so many."""
        self._weight = self._weight * MEMORY + 1
        self._tokens = self._tokens * MEMORY + tokens

    def of(self, most: int) -> int:
        """What is expected of one that may have `most`."""
        return min(most, round((DOUBT * most + self._tokens) / (DOUBT + self._weight)))
