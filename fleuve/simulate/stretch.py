"""A stretch of decode steps in which nothing happens but decoding: how long k steps take, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps of `sequences` running ones that have `kv` tokens in their caches before the first of them.

    A step takes `base + per_kv · K` seconds with K tokens in all the caches, and leaves `sequences` more there.
    """

    sequences: int
    kv: int
    base: float
    per_kv: float

    def seconds(self, steps: int) -> float:
        """What the first `steps` take: an arithmetic series.

        Example: 2 sequences with 10 tokens, 1 s + 0.1 s a token: the first step takes 2 s, the second 2.2 s.
        """
        growth = self.sequences * (steps * (steps - 1) // 2)
        return steps * self.base + self.per_kv * (steps * self.kv + growth)

    def steps_until(self, seconds: float) -> int:
        """The step at whose end `seconds` have passed: the smallest k with `self.seconds(k) >= seconds`.

        The series solved for k, then set right by whole steps where rounding led astray.
        """
        if seconds <= 0:
            return 0
        square = self.per_kv * self.sequences / 2
        linear = self.base + self.per_kv * (self.kv - self.sequences / 2)
        root = math.sqrt(max(linear * linear + 4 * square * seconds, 0.0))
        steps = math.ceil(2 * seconds / (linear + root))
        while steps > 0 and self.seconds(steps - 1) >= seconds:
            steps -= 1
        while self.seconds(steps) < seconds:
            steps += 1
        return steps
