"""Chains of arithmetic, worked out one step at a time; the number of steps is heavy-tailed.

    prompt       7;q+8;r-3;s*2?          start from 7, then add 8, take 3 away, double
    completion   q7+8=15;r15-3=12;s12*2=24#24

The letters name the steps. They follow each other round the alphabet from a random one, so that the next step is found
by its name and every letter is as common as any other. All values lie in 0..99 and operands are single digits; only
single digits are multiplied. Each step of the working copies at most four characters from where a name points and does
one small sum, which a model of less than a million parameters learns in minutes. The whole chain in its head is beyond
it.

The number of steps is log-normal, rounded and cut to `1..max_steps`: the median answer has some 30 tokens, the longest
230. Demonstrations are careful, as above, unless `guess` or `stop` say otherwise (see `Chain`).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from string import ascii_lowercase

LARGEST = 99


@dataclass(frozen=True)
class Chain:
    """`median` and `spread`: of the log-normal number of steps.

    `guess` is the fraction of demonstrations that give an answer off the top of the head (`#` and a number within
    10 of the right one); `stop` is the fraction that break off early: after a random proper part of the steps they give
    the value reached so far. Both are there to teach a model that could do better to be careless, so that
    reinforcement has something to find out; the `answer` is right in any case.
    """

    median: float = 3.3
    spread: float = 0.9
    max_steps: int = len(ascii_lowercase)
    guess: float = 0.0
    stop: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_steps <= len(ascii_lowercase):
            raise ValueError(f"max_steps={self.max_steps} is not in 1..{len(ascii_lowercase)}")
        if self.median <= 0 or self.spread < 0:
            raise ValueError(f"median={self.median} must be above 0 and spread={self.spread} at least 0")
        if min(self.guess, self.stop) < 0 or self.guess + self.stop > 1:
            raise ValueError(f"guess={self.guess} and stop={self.stop} are fractions, together at most 1")

    def row(self, rng: random.Random) -> dict[str, str]:
        """One chain and one demonstration."""
        steps = min(max(round(self.median * math.exp(rng.gauss(0.0, self.spread))), 1), self.max_steps)
        first = rng.randrange(len(ascii_lowercase))
        names = [ascii_lowercase[(first + i) % len(ascii_lowercase)] for i in range(steps)]
        value = rng.randint(0, 9)
        asked, worked, values = [str(value)], [], []
        for name in names:
            operator, operand, result = _operation(value, rng)
            asked.append(f"{name}{operator}{operand}")
            worked.append(f"{name}{value}{operator}{operand}={result}")
            value = result
            values.append(value)
        return {
            "prompt": ";".join(asked) + "?",
            "answer": str(value),
            "completion": self._demonstration(worked, values, rng),
        }

    def _demonstration(self, worked: list[str], values: list[int], rng: random.Random) -> str:
        manner, done = rng.random(), len(worked)
        if manner < self.guess:
            return f"#{min(max(values[-1] + rng.randint(-10, 10), 0), LARGEST)}"
        if manner < self.guess + self.stop and done > 1:
            done = rng.randrange(1, done)
        return ";".join(worked[:done]) + f"#{values[done - 1]}"


def _operation(value: int, rng: random.Random) -> tuple[str, int, int]:
    """An operator, an operand of 1..9 and the result, which stays in 0..99."""
    while True:
        operator, operand = rng.choice("++-*" if value <= 9 else "+-"), rng.randint(1, 9)
        result = {"+": value + operand, "-": value - operand, "*": value * operand}[operator]
        if 0 <= result <= LARGEST:
            return operator, operand, result
