r"""Exact comparison of final answers: one spelling, integers, decimals, fractions, percentages. No sympy here."""

from __future__ import annotations

import re
from fractions import Fraction

from fleuve.rewards.spelling import key, tidy

MAX_DIGITS = 200
MAX_EXPONENT = 100
PLACES, DIGITS = 4, 6
"""A decimal may stand for the value that it rounds if it has four places and four significant digits, or six digits."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_FRACTION = rf"(?:\\frac\{{\s*([-+]?\s*{_DECIMAL})\s*\}}\{{\s*([-+]?\s*{_DECIMAL})\s*\}}|({_DECIMAL})\s*/\s*(\d+))"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>{_DIGITS})(?:\s*(?=\\frac)|\s+(?=\d+\s*/)))?"
    rf"(?:(?P<fraction>{_FRACTION})|(?P<decimal>{_DECIMAL}))"
    r"(?:\s*(?:\\times|\\cdot|x)\s*10\s*\^\s*\{\s*(?P<power>[-+]?\d{1,4})\s*\}|[eE](?P<e>[-+]?\d{1,4}))?"
    r"(?:\s*(?:\\text\{)?\s*(?P<scale>thousand|million|billion|trillion)\s*\}?)?\s*(?P<percent>%?)"
)
_PERIODIC = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}")
_SCALE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def normalise(answer: str) -> str:
    r"""One spelling for what means the same on paper: no `$`, layout, text commands, needless spaces or full stop."""
    return key(tidy(answer))


def number(answer: str) -> Fraction | None:
    r"""The exact value of a plain number, else None. `5\%` is 5/100; `\frac43`, `1/2`, `1,234.50`, `$18` are numbers.

    >>> number("1,234.50")
    Fraction(2469, 2)
    """
    if len(answer) > MAX_DIGITS:
        return None
    return value(re.sub(r"\\text\{dollars\}$", "", tidy(answer)))


def value(text: str) -> Fraction | None:
    r"""`number` of a tidy text.

    >>> value(r"137\frac{1}{2}"), value("6.72e-1"), value("2 million")
    (Fraction(275, 2), Fraction(84, 125), Fraction(2000000, 1))
    """
    if len(text) > MAX_DIGITS:
        return None
    if period := _PERIODIC.fullmatch(text):
        sign, whole, start, repeated = period.groups()
        tail = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(start))
        return (Fraction(f"{whole or 0}.{start or 0}") + tail) * (-1 if sign == "-" else 1)
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    try:
        result = _fraction(match["fraction"]) if match["fraction"] else _decimal(match["decimal"])
    except ZeroDivisionError:
        return None
    if match["whole"]:
        if not match["fraction"] or not 0 <= result < 1:  # 2(−3/4) and 2(7/4) are products
            return None
        result += _decimal(match["whole"])
    if power := match["power"] or match["e"]:
        if abs(int(power)) > MAX_EXPONENT:
            return None
        result *= Fraction(10) ** int(power)
    result *= _SCALE.get(match["scale"] or "", 1)
    return (-result if match["sign"] == "-" else result) / (100 if match["percent"] else 1)


def is_decimal(answer: str) -> bool:
    """Whether it is written with digits and a point alone: such a number has no other exact spelling."""
    return "/" not in answer and "frac" not in answer


def may_round(text: str) -> bool:
    """Whether a tidy text is a decimal with enough digits to stand for the value that it is the rounding of."""
    match = re.fullmatch(r"[-+]?(\d*)\.(\d+)", text.replace(",", ""))
    if match is None:
        return False
    significant = len((match[1] + match[2]).lstrip("0"))
    return (len(match[2]) >= PLACES and significant >= 4) or significant >= DIGITS


def is_rounding(text: str, exact: Fraction) -> bool:
    """Whether a decimal that `may_round` is `exact`, rounded half up or half to even at its last place."""
    places = len(text.partition(".")[2])
    return bool(abs(Fraction(text.replace(",", "").lstrip("+")) - exact) * 2 <= Fraction(1, 10**places))


def is_near(text: str, exact: Fraction) -> bool:
    """Whether a number of any form may be given for what `exact` is approximately: it is that, rounded or cut off at
    its last digit that is not 0, or less than a hundredth away."""
    given = value(text)
    if given is None:
        return False
    digits = re.fullmatch(r"[-+]?[\d,]*?(0*)(?:\.(\d*))?", text)
    unit = Fraction(0)
    if digits is not None:
        unit = Fraction(1, 10 ** len(digits[2])) if digits[2] else Fraction(10 ** len(digits[1]))
    away = abs(given - exact)
    cut_off = given != 0 and abs(given) < abs(exact) and away < unit
    return cut_off or away * 2 <= unit or away * 100 < abs(exact)


def _decimal(text: str) -> Fraction:
    text = text.replace(",", "").replace(" ", "").lstrip("+")
    return Fraction(f"{text}0" if text.endswith(".") else text)


def _fraction(text: str) -> Fraction:
    top, bottom = re.findall(rf"[-+]?\s*{_DECIMAL}", text.replace("frac", ""))
    return _decimal(top) / _decimal(bottom)
