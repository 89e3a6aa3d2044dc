r"""Sets of numbers: intervals (`(2, \infty)`, `x \in [-2, 7]`), unions of them, inequalities (`-2 \le x < 7`)."""

from __future__ import annotations

import re
from typing import NamedTuple

from fleuve.rewards.structures import elements

_MEMBER = re.compile(r"([a-zA-Z])\s*\\in(?![a-zA-Z])\s*(.*)", re.DOTALL)
_UNION = re.compile(r"\\cup(?![a-zA-Z])|\s+or\s+")
_RELATION = re.compile(r"(\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<|>)")
_NAME = re.compile(r"[a-zA-Z](?:_\{[a-zA-Z0-9]+\})?")
_MARKS = re.compile(r"\\in(?![a-zA-Z])|\\cup|\\[lg]e(?![a-zA-Z])|[<>]")


class Interval(NamedTuple):
    """From `low` to `high` (as text); `brackets` says which ends belong to it, as in `(]`."""

    brackets: str
    low: str
    high: str


class Region(NamedTuple):
    """A union of intervals, and the name of the variable that lies in it, if one is given."""

    pieces: list[Interval]
    name: str


def looks_like_region(text: str) -> bool:
    """Whether a tidy text has a sign of one: an inequality, membership, a union."""
    return bool(_MARKS.search(text))


def region(text: str) -> Region | None:
    r"""The set of numbers that a tidy text describes; None if it is written in no way known here.

    >>> region(r"-2 \le x < 7")
    Region(pieces=[Interval(brackets='[)', low='-2', high='7')], name='x')
    """
    names: set[str] = set()
    if match := _MEMBER.fullmatch(text.strip()):
        names.add(match[1])
        text = match[2]
    pieces = []
    for part in _UNION.split(text):
        piece = _interval(part.strip(), names)
        if piece is None:
            return None
        pieces.append(piece)
    if len(names) > 1:
        return None
    return Region(pieces, next(iter(names), ""))


def _interval(text: str, names: set[str]) -> Interval | None:
    if match := _MEMBER.fullmatch(text):
        names.add(match[1])
        text = match[2]
    if not _RELATION.search(text):
        parts = elements(text)
        if parts is None or len(parts[1]) != 2 or parts[0] not in ("()", "(]", "[)", "[]"):
            return None
        return Interval(parts[0], *parts[1])
    sides = [side.strip() for side in _RELATION.split(text)]
    if len(sides) == 3:
        left, relation, right = sides
        if _NAME.fullmatch(right) and not _NAME.fullmatch(left):
            left, relation, right = right, _turned(relation), left
        if not _NAME.fullmatch(left):
            return None
        names.add(left)
        closed = relation in ("\\le", "\\ge")
        if relation in ("<", "\\le"):
            return Interval("(]" if closed else "()", "-\\infty", right)
        return Interval("[)" if closed else "()", right, "\\infty")
    if len(sides) == 5:
        low, first, name, second, high = sides
        if _turned(first) in ("<", "\\le"):
            low, first, second, high = high, _turned(second), _turned(first), low
        if {first, second} - {"<", "\\le"} or not _NAME.fullmatch(name):
            return None
        names.add(name)
        return Interval(("[" if first == "\\le" else "(") + ("]" if second == "\\le" else ")"), low, high)
    return None


def _turned(relation: str) -> str:
    return {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}[relation]
