"""Verdicts that take their time."""

from __future__ import annotations

import asyncio
import math
import random

from fleuve.types import Prompt, Verdict


class SimulatedRewarder:
    """Implements `contracts.Rewarder`: 1 or 0 at random, after a lognormal latency of mean `seconds` and spread
    `sigma` (the standard deviation of its logarithm)."""

    def __init__(self, seconds: float, sigma: float, seed: int) -> None:
        self._seconds = seconds
        self._sigma = sigma
        self._mu = math.log(seconds) - sigma * sigma / 2 if seconds else 0.0
        self._random = random.Random(seed)

    async def score(self, prompt: Prompt, text: str) -> Verdict:
        """Never without a verdict."""
        seconds = self._random.lognormvariate(self._mu, self._sigma) if self._seconds else 0.0
        if seconds:
            await asyncio.sleep(seconds)
        return Verdict(score=float(self._random.getrandbits(1)), seconds=seconds)
