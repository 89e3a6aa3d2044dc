"""Is what a program printed what it should have printed?"""

from __future__ import annotations

import math
import re

TOLERANCE = 1e-6
"""Relative and absolute, of numbers that are written with a point or an exponent in the expected output."""

_DIGITS = re.compile(r"[-+.0-9eE]+")  # `float` would also take ١, and 1_0


def same_output(given: str, expected: str, tolerance: float = TOLERANCE) -> bool:
    """Line by line, word by word: amounts of white space do not count, nor do empty lines at the end; numbers may
    differ by `tolerance` where the expected one is no integer.

    >>> same_output("1  2 \\n0.3333333\\n\\n", "1 2\\n0.33333333333")
    True
    >>> same_output("1 2", "1\\n2")
    False
    """
    left, right = _lines(given), _lines(expected)
    return len(left) == len(right) and all(
        len(words) == len(wanted) and all(_same_word(a, b, tolerance) for a, b in zip(words, wanted, strict=True))
        for words, wanted in zip(left, right, strict=True)
    )


def _lines(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_word(given: str, expected: str, tolerance: float) -> bool:
    if given == expected:
        return True
    if not any(mark in expected for mark in ".eE") or len(given) > 400 or not _DIGITS.fullmatch(given + expected):
        return False
    try:
        numbers = float(given), float(expected)
    except ValueError:
        return False
    return all(map(math.isfinite, numbers)) and math.isclose(*numbers, rel_tol=tolerance, abs_tol=tolerance)
