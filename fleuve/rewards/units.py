r"""Units at the end of an answer: `15\text{ cm}^2`, `18 dollars a day`, `30^\circ`.

A unit may be left out, by the answer or by the reference. Where both name one and both are known here, they must be the
same: 15 cm is not 15 m, nor 15 cm². Words that are no units (`7 or less`, `3 dozen`) are part of the answer.
"""

from __future__ import annotations

import re
from collections import Counter

from fleuve.rewards.exact import value

Unit = tuple[tuple[str, int], ...]
"""Base units and their powers, sorted; empty for words without a known meaning (`apples`)."""

_SPELLINGS = {
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "inch": "in inch inches",
    "foot": "ft foot feet",
    "yard": "yd yard yards",
    "mile": "mi mile miles",
    "second": "s sec secs second seconds",
    "minute": "min mins minute minutes",
    "hour": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr year years",
    "gram": "g gram grams",
    "kg": "kg kilogram kilograms kilo kilos",
    "pound": "lb lbs pound pounds",
    "ounce": "oz ounce ounces",
    "ton": "ton tons tonne tonnes",
    "litre": "l liter liters litre litres",
    "ml": "ml milliliter milliliters millilitre millilitres",
    "gallon": "gal gallon gallons",
    "quart": "qt quart quarts",
    "pint": "pt pint pints",
    "dollar": "dollar dollars usd",
    "cent": "cent cents",
    "euro": "euro euros eur",
    "degree": "degree degrees deg",
    "radian": "radian radians rad",
}
_KNOWN = {word: unit for unit, words in _SPELLINGS.items() for word in words.split()}
_NO_UNITS = """
    and or not to than pi thousand million billion trillion hundred dozen half squared cubed factorial times plus minus
    over less least most fewer between mod modulo base if when else otherwise undefined infinity none no only root power
    approximately about choose where for all any maybe perhaps possibly probably likely either neither nor but wait
    alternatively instead also both correct incorrect wrong right answer guess unsure
"""
_NOT_UNITS = frozenset(_NO_UNITS.split())
_MAX_WORDS = 6
_TOKEN = (
    r"\\text\{[^{}]*\}|\\frac\{\\text\{[^{}]*\}(?:\^\{\d\})?\}\{\\text\{[^{}]*\}(?:\^\{\d\})?\}|\^\{(?:-?\d|\\circ)\}"
)
_UNIT = re.compile(rf"(?:{_TOKEN}|[/()\s]|\\cdot|[a-zA-Z]+)+")
_BARE = re.compile(r"(?:\s+|(?<=\d))([a-zA-Z]{2,}(?:[ /]+[a-zA-Z]+){0,5}(?:\^\{-?\d\})?)$")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_HALF_DAY = re.compile(r"([apAP])\.?\s*[mM]\.?")
_WORD = re.compile(r"[a-zA-Z]+|/|\^\{(-?\d)\}")


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""A tidy answer without its unit, and the unit; None if it names none.

    >>> split_unit(r"15\text{cm}^{2}"), split_unit("18 dollars a day")[0]
    (('15', (('cm', 2),)), '18')
    """
    for match in re.finditer(r"\\frac\{\\text\{|\\text\{|\^\{\\circ\}", text):
        body, tail = text[: match.start()].rstrip(), text[match.start() :]
        if tail.startswith("^") and _ANGLE.search(body):
            break
        if body and _UNIT.fullmatch(tail) and not _aside(tail) and (unit := _unit(tail)) is not None:
            return body.removesuffix("\\cdot").rstrip(), unit
        break
    if bare := _BARE.search(text):
        body = text[: bare.start()].rstrip()
        words = re.findall("[a-zA-Z]+", bare[1])
        known = all(word.lower() in _KNOWN or word.lower() in ("square", "cubic", "per", "sq") for word in words)
        if (value(body) is not None or (known and body)) and (unit := _unit(bare[1])) is not None:
            return body, unit
    return text, None


def conflict(one: Unit | None, other: Unit | None) -> bool:
    """Whether both are known and differ."""
    return bool(one) and bool(other) and one != other


def _aside(tail: str) -> bool:
    """Whether there is a second answer among the words, or a remark: a number, a question, something in brackets."""
    words = " ".join(re.findall(r"\\text\{([^{}]*)\}", tail))
    brackets = re.findall(r"\(([^()]*)\)", words)
    known = all(word.lower() in _KNOWN or word in ("s", "es") for text in brackets for word in text.split() or "?")
    return not known or re.search(r"(?<![a-zA-Z])\d|\?", words) is not None


def _unit(tail: str) -> Unit | None:
    """The base units of a unit's words; empty if one has no known meaning, None if these words are no unit."""
    tail = re.sub(r"\\frac\{(.*?)\}\{(\\text\{[^{}]*\}(?:\^\{\d\})?)\}", r"\1/\2", tail)
    flat = tail.replace("^{\\circ}", " degree ").replace("\\text{", " ").replace("\\cdot", " ")
    flat = re.sub(r"(?<!\d)\}", " ", flat)
    if half := _HALF_DAY.fullmatch(flat.strip()):
        return ((f"{half[1].lower()}m", 1),)
    powers: Counter[str] = Counter()
    sign, power, last, known, words = 1, 1, "", True, 0
    for match in _WORD.finditer(flat):
        word = match[0].lower()
        if match[1] is not None:
            if last:
                powers[last] += sign * (int(match[1]) - 1)
            continue
        if word in ("/", "per", "a", "an", "each", "every"):
            sign = -1
            continue
        words += 1
        if word in _NOT_UNITS or words > _MAX_WORDS:
            return None
        if word in ("square", "sq", "cubic"):
            power = 3 if word == "cubic" else 2
            continue
        if word == "mph":
            powers["mile"] += 1
            powers["hour"] -= 1
            last = ""
            continue
        last = _KNOWN.get(word, "")
        if not last:
            known = False
        else:
            powers[last] += sign * power
        power = 1
    return tuple(sorted(powers.items())) if known else ()
