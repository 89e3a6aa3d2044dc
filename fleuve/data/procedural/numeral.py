"""A number in words, to be written in digits: for small chat models, which half know it.

prompt       Write the number fifty-nine in digits.
completion   59
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
HIGHEST = 999


@dataclass(frozen=True)
class Numeral:
    """Numbers of `lowest..highest`, within 0..999."""

    lowest: int = 1
    highest: int = 99

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= self.highest <= HIGHEST:
            raise ValueError(f"lowest={self.lowest} to highest={self.highest} is not within 0..{HIGHEST}")

    def row(self, rng: random.Random) -> dict[str, str]:
        """One number."""
        number = rng.randint(self.lowest, self.highest)
        return {
            "prompt": f"Write the number {in_words(number)} in digits.",
            "answer": str(number),
            "completion": str(number),
        }


def in_words(number: int) -> str:
    """A number of 0..999 in English words.

    >>> in_words(342)
    'three hundred and forty-two'
    """
    if number < len(ONES):
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens] + (f"-{ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{ONES[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
