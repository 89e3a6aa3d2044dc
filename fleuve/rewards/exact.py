r"""Exact comparison of final answers: normalised strings, integers, decimals, fractions, percentages. No sympy here."""

from __future__ import annotations

import re
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(rf"([-+]?)\s*({_DIGITS}?(?:\.\d+)?|{_DIGITS}\.)")
_RATIO = re.compile(
    r"([-+]?)\s*(?:\\[dtc]?frac\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|(\d+)\s*/\s*(\d+))"
)
_WRAPPER = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\[,!;:> ]|\\q?quad\b|\\displaystyle\b|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|~")
_NO_UNIT = r"(?!(?:pi|thousand|million|billion|hundred|dozen|and|or|half|to)\b)"
_UNITS = re.compile(rf"\s+{_NO_UNIT}[a-zA-Z]{{2,}}(?:\s+{_NO_UNIT}(?:a|[a-zA-Z]{{2,}})){{0,3}}$")
MAX_DIGITS = 200


def normalise(answer: str) -> str:
    r"""One spelling for what means the same on paper: no `$`, layout, `\text{}`, spaces or final full stop."""
    answer = answer.strip().rstrip(".").strip("$").strip()
    answer = _WRAPPER.sub(r"\1", answer.replace("\\$", "").replace(r"\%", "%"))
    answer = answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    answer = re.sub(r",\s*\\!\s*", ",", answer)
    answer = _LAYOUT.sub("", answer)
    answer = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)", "", answer)
    return re.sub(r"\s+", "", answer)


def number(answer: str) -> Fraction | None:
    r"""The exact value of a plain number, else None. `5\%` is 5/100; `\frac43`, `1/2`, `1,234.50`, `$18` are numbers.

    >>> number("1,234.50")
    Fraction(2469, 2)
    """
    if len(answer) > MAX_DIGITS:
        return None
    text = answer.strip().rstrip(".").replace("\\!", "").replace("\\$", "").strip("$ ").replace("\\%", "%")
    text = text.replace("-$", "-")
    scale = 1
    if text.endswith("%"):
        text, scale = text[:-1].rstrip(), 100
    if (match := _DECIMAL.fullmatch(text)) and match[2]:
        value = Fraction(match[2].replace(",", ""))
    elif match := _RATIO.fullmatch(text):
        top = match[2] or match[3] or match[6]
        bottom = int(match[4] or match[5] or match[7])
        if bottom == 0:
            return None
        value = Fraction(int(top), bottom)
    else:
        return None
    return (-value if match[1] == "-" else value) / scale


def number_with_unit(answer: str) -> Fraction | None:
    r"""The value of a number followed by at most four plain words (`18 dollars a day` is 18), else None."""
    text = _WRAPPER.sub(r" \1", answer).strip().rstrip(".")
    text = text.replace("percent", "%") if re.fullmatch(r"\S+ ?percent", text) else text
    return number(_UNITS.sub("", text))


def is_decimal(answer: str) -> bool:
    """Whether it is written with digits and a point alone: such a number has no other exact spelling."""
    return "/" not in answer and "frac" not in answer
