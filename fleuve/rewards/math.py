r"""Is this answer right? Strict first, symbolic second.

Strict: the last box (see `extraction`), compared as string and as exact number. Symbolic: math-verify, on single
expressions only: tuples, lists and intervals are taken apart here and compared element by element, in order, because
a set comparison would take `3,2,1` for `1,2,3`.

The symbolic step can take arbitrarily long (`9^{9^{9^9}}`), and its library's own time-outs work by a signal that only
a main thread can set. So they are switched off: deadlines are kept from outside, by `rewards.pool`.
"""

from __future__ import annotations

import logging
import re
from itertools import permutations
from typing import Any

from fleuve.rewards.exact import is_decimal, normalise, number, number_with_unit
from fleuve.rewards.extraction import extract, reference

MAX_SYMBOLIC = 512
"""Characters past which an expression is compared as a string only."""
MAX_DEPTH = 12
"""Nested braces past which an expression is compared as a string only."""

_OPEN, _CLOSE = "([{", ")]}"
_SET_LIKE = re.compile(r"\\pm|\\mp|[<>]|\\[lg]eq?\b|\\in\b|\\cup|\\cap")
_TOWER = re.compile(r"\^\s*\{?\s*-?\d{5,}|\d\s*[})]*\s*\^[\s{(]*\d+[\s{(]*\^|\d{4,}\s*[})]*\s*!|!\s*[)}\]]*\s*!")
_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_INTERVAL_MEMBER = re.compile(r"^[a-zA-Z]\s*\\in\s*")


def verify_math(text: str, answer: str) -> float:
    r"""1.0 if the final answer in `text` equals the reference `answer`, else 0.0.

    `answer` may be a worked solution (`... #### 18`). Exact numbers and strings cost microseconds, without sympy.

    >>> verify_math(r"so it is \boxed{0.5}", r"\frac{1}{2}")
    1.0
    >>> verify_math(r"\boxed{5\%}", "5")
    0.0
    """
    given, wanted = extract(text), reference(answer)
    if not given or not wanted:
        return 0.0
    return 1.0 if equal(given, wanted) else 0.0


def equal(given: str, wanted: str) -> bool:
    """Whether two final answers mean the same. Not symmetric: units and words are forgiven in `given` alone."""
    if normalise(given) == normalise(wanted) != "":
        return True
    wanted_number = number(wanted)
    given_number = number(given) if wanted_number is None else number_with_unit(given)
    if given_number is not None and wanted_number is not None:
        if given_number == wanted_number:
            return True
        if is_decimal(given) == is_decimal(wanted) or "%" in given + wanted:
            return False
    if ("%" in given) != ("%" in wanted) or _other_base(given, wanted):
        return False
    if len(given) > MAX_SYMBOLIC or _depth(given) > MAX_DEPTH or _TOWER.search(given):
        return False
    return _equal_structures(given.replace("\\%", ""), wanted.replace("\\%", ""))


def _other_base(given: str, wanted: str) -> bool:
    """Whether `given` names a number base (`52_9`) that is not the reference's; math-verify drops them as units."""
    base = _BASE.search(normalise(given))
    return base is not None and ((other := _BASE.search(normalise(wanted))) is None or other[1] != base[1])


def _equal_structures(given: str, wanted: str) -> bool:
    """Tuples, lists, intervals and sets element by element; anything else symbolically."""
    left, right = _elements(given), _elements(wanted)
    if left is None and right is None:
        return _equal_symbolically(given, wanted)
    if left is not None and right is not None:
        (left_brackets, left_parts), (right_brackets, right_parts) = left, right
        if left_brackets != right_brackets or len(left_parts) != len(right_parts):
            return False
        if left_brackets == "{}" and len(left_parts) <= 5:
            return any(all(map(equal, order, right_parts)) for order in permutations(left_parts))
        return all(map(equal, left_parts, right_parts))
    # One side is a list and the other may still describe the same set: `1 \pm \sqrt{2}`, `x > 2`.
    return bool(_SET_LIKE.search(wanted if right is None else given)) and _equal_symbolically(given, wanted)


def _elements(answer: str) -> tuple[str, list[str]] | None:
    r"""`(2, 3]` to `("(]", ["2", "3"])`, `1, 2` to `("", ["1", "2"])`; None for a single expression."""
    text = re.sub(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])", "", answer).strip().strip("$").strip()
    text = _INTERVAL_MEMBER.sub("", text.replace("\\{", "{").replace("\\}", "}")).replace(",\\!", "")
    if "\\begin" in text:
        return None
    brackets = ""
    if text[:1] in _OPEN and text[-1:] in _CLOSE and text and _wraps(text):
        brackets, text = text[0] + text[-1], text[1:-1]
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    if len(parts) == 1 and brackets != "{}":
        return None
    return brackets, parts


def _wraps(text: str) -> bool:
    """Whether the first bracket is closed by the last one: true of `(1, 2]`, not of `(a)(b)`."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0:
            return position == len(text) - 1
    return False


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in _OPEN) - (character in _CLOSE)
        deepest = max(deepest, depth)
    return deepest


def _equal_symbolically(given: str, wanted: str) -> bool:
    library = _library()
    try:
        left, right = (_parse(library, answer) for answer in (given, wanted))
        return bool(left and right and library.verify(right, left, timeout_seconds=None))
    except MemoryError:
        raise
    except Exception:
        # The libraries fail in many ways on what is no mathematics. That it equals the reference is then not shown.
        return False


def _parse(library: Any, answer: str) -> Any:
    # LaTeX only: the plain-expression parser of the library hands text to Python's eval.
    targets = [library.LatexExtractionConfig(boxed_match_priority=0)]
    return library.parse(f"\\boxed{{{answer}}}", extraction_config=targets, parsing_timeout=None)


def _library() -> Any:
    """math-verify, imported at first need: it takes a second, and exact answers do without it."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def warm() -> None:
    """Import and exercise the symbolic step, so that the first check's deadline does not pay for it."""
    _equal_symbolically("x+1", "1+x")
