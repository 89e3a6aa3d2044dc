"""Which of some numbers is the largest or the smallest, asked in plain English: for small chat models.

prompt       Which number is larger, 15 or 86?
completion   86
"""

from __future__ import annotations

import random
from dataclasses import dataclass

WORDS = {2: ("larger", "smaller"), 3: ("largest", "smallest")}


@dataclass(frozen=True)
class Compare:
    """`count` different numbers out of `lowest..highest`."""

    count: int = 2
    lowest: int = 10
    highest: int = 99

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"count={self.count} is below 2")
        if self.highest - self.lowest + 1 < self.count:
            raise ValueError(f"lowest={self.lowest} to highest={self.highest} has not {self.count} different numbers")

    def row(self, rng: random.Random) -> dict[str, str]:
        """One question; the answer is one of its numbers."""
        numbers = rng.sample(range(self.lowest, self.highest + 1), self.count)
        larger, smaller = WORDS[min(self.count, 3)]
        word, answer = rng.choice([(larger, max(numbers)), (smaller, min(numbers))])
        listed = ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
        return {
            "prompt": f"Which number is {word}, {listed}?",
            "answer": str(answer),
            "completion": str(answer),
        }
