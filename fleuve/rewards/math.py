r"""Is this answer right? Strict first, symbolic second.

Strict: the last box (see `extraction`), compared as text in one spelling and as exact number. Then by structure: what
has several parts (tuples, lists, sets, intervals, matrices, equations) is taken apart here and compared part by part,
in order, because a set comparison would take `3,2,1` for `1,2,3`. Only single expressions are compared symbolically.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import TypeVar

from fleuve.rewards.choices import choice, offered
from fleuve.rewards.exact import is_decimal, is_near, is_rounding, may_round, value
from fleuve.rewards.extraction import extract, reference
from fleuve.rewards.intervals import looks_like_region, region
from fleuve.rewards.spelling import key, tidy
from fleuve.rewards.structures import both_signs, depth, elements, matrix, same_in_some_order, split, without_thousands
from fleuve.rewards.symbolic import MAX_DEPTH, MAX_LENGTH, equal_equations, equal_symbolically, numeric, warm
from fleuve.rewards.units import conflict, split_unit

T = TypeVar("T")
_PLAIN = re.compile(r"[-+]?\d+(?:\.\d+)?")
_LETTER = re.compile(r"\(\s*([A-J])\s*\)|([A-J])")
_LABEL = re.compile(r"\(\s*[A-J]\s*\)|[A-J][.):]")
_WORDS = re.compile(r"[a-zA-Z][a-zA-Z '\-]*")
_ARTICLE = re.compile(r"^(?:the|an?)\s+")
_NAME = re.compile(
    r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\{\w+\})?'?(?:\s*\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\))?"
    r"|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])+\s*\)|\\text\{[^{}]*\}|[a-zA-Z]{2,}(?: [a-zA-Z]+)*"
)
_BASE = re.compile(r"(-?[0-9A-F]+)\s*_\{(\d+)\}")
_BASE_NAMES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "eleven": "11", "twelve": "12", "sixteen": "16",
}  # fmt: skip
_BASE_NAME = re.compile(r"_\{?\\?(?:text)?\{?(" + "|".join(_BASE_NAMES) + r")\}?\}?")


def verify_math(text: str, answer: str, choices: Sequence[str] = ()) -> float:
    r"""1.0 if the final answer in `text` equals the reference `answer`, else 0.0.

    `answer` may be a worked solution (`... #### 18`). `choices` are the texts of a multiple choice, if it is one: then
    its letter and its text are the same answer. Exact numbers and texts cost microseconds, without sympy.

    >>> verify_math(r"so it is \boxed{0.5}", r"\frac{1}{2}")
    1.0
    >>> verify_math(r"\boxed{5\%}", "5")
    0.0
    """
    given, wanted = extract(text), reference(answer)
    if not given or not wanted:
        return 0.0
    return 1.0 if equal(given, wanted, choices) else 0.0


def equal(given: str, wanted: str, choices: Sequence[str] = ()) -> bool:
    """Whether two final answers mean the same. Not symmetric where the reference says what kind of answer it is."""
    if len(given) > MAX_LENGTH or depth(given) > MAX_DEPTH:
        return given.strip() == wanted.strip()
    if _PLAIN.fullmatch(given) and _PLAIN.fullmatch(wanted):
        return Fraction(given) == Fraction(wanted)
    given, wanted = (_BASE_NAME.sub(lambda m: f"_{{{_BASE_NAMES[m[1]]}}}", tidy(answer)) for answer in (given, wanted))
    if key(given) == key(wanted) != "":
        return True
    decided = _chosen(given, wanted, choices)
    return _same(given, wanted) if decided is None else decided


def _chosen(given: str, wanted: str, choices: Sequence[str]) -> bool | None:
    """Multiple choice, if the reference is one: by letter, or by the text of the choice. None: it is none."""
    lettered = _LETTER.fullmatch(wanted)
    labelled = choice(wanted) if lettered or _LABEL.match(wanted) else None
    if labelled is None:
        if choices and (mine := choice(given)) is not None:
            text = offered(mine[0], choices)
            return text is not None and _same(tidy(text), wanted)
        return None
    letter, text = labelled
    if (mine := choice(given)) is not None:
        return mine[0] == letter
    text = text or tidy(offered(letter, choices) or "")
    return bool(text) and (key(given) == key(text) or _same(given, text))


def _same(given: str, wanted: str) -> bool:
    """Two tidy answers, by the kind of the reference."""
    if key(given) == key(wanted) != "":
        return True
    given_value, wanted_value = value(given), value(wanted)
    if given_value is not None and wanted_value is not None:
        return _same_number(given, wanted)
    if _is_words(given) or _is_words(wanted):
        return _words(given) == _words(wanted)
    if all(re.fullmatch("[a-zA-Z]|[A-Z]{2,}", text) for text in (given, wanted)):
        return False  # names: `e` is not E, and AB no product
    if looks_like_region(given) or looks_like_region(wanted):
        return _same_region(given, wanted)
    if len(split(given, "=")) > 1 or len(split(wanted, "=")) > 1:
        return _same_equation(given, wanted)
    if "\\approx" in given:
        return _same_approximation(given, wanted)
    rows, wanted_rows = matrix(given), matrix(wanted)
    if rows is not None or wanted_rows is not None:
        return (
            rows is not None and wanted_rows is not None and _all_same(rows, wanted_rows, partial(_all_same, by=_same))
        )
    several = _same_parts(given, wanted)
    return _same_quantity(given, wanted) if several is None else several


def _all_same(left: Sequence[T], right: Sequence[T], by: Callable[[T, T], bool]) -> bool:
    return len(left) == len(right) and all(map(by, left, right))


def _same_parts(given: str, wanted: str) -> bool | None:
    """Tuples, lists and sets part by part; None if both are single expressions."""
    left, right = elements(given), elements(wanted)
    if (left is None) != (right is None):  # `1,234` is a list if the other one is
        left, right = left or elements(given, thousands=False), right or elements(wanted, thousands=False)
    signs = any("\\pm" in text or "\\mp" in text for text in (given, wanted))
    if left is None and right is None and not signs:
        return None
    left_brackets, left_parts = left or ("", [given])
    right_brackets, right_parts = right or ("", [wanted])
    if left_brackets != right_brackets or "" in left_parts:
        return False
    if signs:
        left_parts, right_parts = both_signs(left_parts), both_signs(right_parts)
    if signs or left_brackets == "{}":
        return same_in_some_order(left_parts, right_parts, _same)
    return _all_same(left_parts, right_parts, _same)


def _same_region(given: str, wanted: str) -> bool:
    left, right = region(given), region(wanted)
    if left is None or right is None or (left.name and right.name and left.name != right.name):
        return False

    def same(index: str, other: str) -> bool:
        one, two = left.pieces[int(index)], right.pieces[int(other)]
        return one.brackets == two.brackets and _same(one.low, two.low) and _same(one.high, two.high)

    return same_in_some_order(
        [str(i) for i in range(len(left.pieces))], [str(i) for i in range(len(right.pieces))], same
    )


def _same_approximation(given: str, wanted: str) -> bool:
    r"""`x \approx 3.14` against 3.14, `\frac13 \approx 0.33` against 1/3: the exact side counts, and the other must be
    it, rounded."""
    exact, _, rounded = (part.strip() for part in given.partition("\\approx"))
    if not exact or (_NAME.fullmatch(exact) and exact != "\\pi"):
        return _same(rounded, wanted)
    if value(rounded) is not None:
        number = value(exact)
        number = numeric(exact) if number is None else number
        if number is not None and not is_near(rounded, number):
            return False
    return _same(exact, wanted)


def _same_equation(given: str, wanted: str) -> bool:
    r"""`x = 5` against `5`, `f(x) = ...` against its right side, `2+3 = 5` against 5; two equations alike."""
    left, right = split(given, "="), split(wanted, "=")
    if "" in left or "" in right:
        return False
    if len(right) == 1:
        if (several := _several_equations(given, wanted)) is not None:
            return several
        # Every side is a name or the value: `x + y = 5` says nothing of 5.
        values = [side for side in left if not _NAME.fullmatch(side)]
        return bool(values) and not _NAME.fullmatch(left[-1]) and all(_same(side, wanted) for side in values)
    if len(left) == 1:
        return len(right) == 2 and bool(_NAME.fullmatch(right[0])) and _same(given, right[1])
    if len(left) != 2 or len(right) != 2:
        return False
    if key(left[0]) == key(right[0]) and _NAME.fullmatch(left[0]):
        return _same(left[1], right[1])
    if _NAME.fullmatch(left[0]) and _NAME.fullmatch(right[0]) and not re.search("[a-zA-Z]", left[1] + right[1]):
        return False
    return equal_equations((left[0], left[1]), (right[0], right[1]))


def _several_equations(given: str, wanted: str) -> bool | None:
    """`x = 1, x = -2` against `1, -2`: one name, several values. None if this is not of that form."""
    parts = elements(given)
    if parts is None or parts[0] or len(parts[1]) < 2:
        return None
    sides = [split(part, "=") for part in parts[1]]
    names = {key(side[0]) for side in sides if len(side) == 2}
    if len(names) != 1 or any(len(side) > 2 for side in sides):
        return None
    return _same(", ".join(side[-1] for side in sides), wanted)


def _same_quantity(given: str, wanted: str) -> bool:
    """Two single expressions, with or without units, bases and percent signs."""
    (given, unit), (wanted, wanted_unit) = split_unit(given), split_unit(wanted)
    if conflict(unit, wanted_unit):
        return False
    if key(given) == key(wanted) != "":
        return True
    if value(given) is not None and value(wanted) is not None:
        return _same_number(given, wanted)
    if ("%" in given) != ("%" in wanted):
        return False
    given, wanted = given.replace("%", ""), wanted.replace("%", "")
    given, wanted = without_thousands(given), without_thousands(wanted)
    (given, base), (wanted, wanted_base) = _base(given), _base(wanted)
    if base is not None or wanted_base is not None:
        return given == wanted and base in (None, wanted_base)
    for decimal, exact in ((given, wanted), (wanted, given)):
        if may_round(decimal) and value(exact) is None:
            number = numeric(exact)
            if number is not None and is_rounding(decimal, number):
                return True
    return equal_symbolically(given, wanted)


def _same_number(given: str, wanted: str) -> bool:
    """Two plain numbers: exactly, or one a rounding of the other to four places or more."""
    one, two = value(given), value(wanted)
    if one is None or two is None:
        return False
    if one == two:
        return True
    if "%" in given + wanted:
        return False
    if is_decimal(given) != is_decimal(wanted):
        decimal, exact = (given, two) if is_decimal(given) else (wanted, one)
        return may_round(decimal) and is_rounding(decimal, exact)
    return False


def _base(text: str) -> tuple[str, str | None]:
    """`52_{8}` as digits and base."""
    match = _BASE.fullmatch(text.strip())
    return (match[1], match[2]) if match else (text, None)


def _is_words(text: str) -> bool:
    """Whether this is no mathematics but a word of four letters or more, or several words."""
    return bool(_WORDS.fullmatch(text)) and any(len(word) >= 4 for word in text.split())


def _words(text: str) -> str:
    return _ARTICLE.sub("", " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).lower().split()))


__all__ = ["equal", "verify_math", "warm"]
