r"""Answers of several parts: tuples, lists, sets, matrices, and `\pm`, taken apart in their order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

OPEN, CLOSE = "([{", ")]}"
MAX_PARTS = 64
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_CONNECTIVE = re.compile(r",?\s+(?:and|or)\s+")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{(?:[pbB]|small)?matrix\}(.*?)\\end\{(?:[pbB]|small)?matrix\}\s*[)\]]?", re.DOTALL
)

Equal = Callable[[str, str], bool]


def elements(text: str, thousands: bool = True) -> tuple[str, list[str]] | None:
    r"""`(2, 3]` to `("(]", ["2", "3"])`, `1 and 2` to `("", ["1", "2"])`; None for a single expression.

    Without brackets `1,234` is one number if `thousands`.
    """
    text = text.replace("\\{", "{").replace("\\}", "}").strip()
    if "\\begin" in text or not text:
        return None
    brackets = ""
    if text[0] in OPEN and text[-1] in CLOSE and _wraps(text):
        brackets, text = text[0] + text[-1], text[1:-1]
    elif thousands:
        text = without_thousands(text)
    parts = split(_CONNECTIVE.sub(", ", text), ",")
    if len(parts) == 1 and (brackets != "{}" or "\\text" in text):
        return None
    return brackets, parts


def without_thousands(text: str) -> str:
    """`1,000x` as `1000x`."""
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def split(text: str, separator: str) -> list[str]:
    """The parts between the separators that no bracket holds."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in OPEN:
            depth += 1
        elif character in CLOSE:
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def depth(text: str) -> int:
    """The deepest nesting of brackets and braces."""
    now = deepest = 0
    for character in text:
        now += (character in OPEN) - (character in CLOSE)
        deepest = max(deepest, now)
    return deepest


def both_signs(parts: Sequence[str]) -> list[str]:
    r"""Each part with `\pm` or `\mp` as two, the first with its upper signs."""
    spelled = []
    for part in parts:
        if "\\pm" in part or "\\mp" in part:
            for plus, minus in (("+", "-"), ("-", "+")):
                spelled.append(part.replace("\\pm", plus).replace("\\mp", minus).removeprefix("+").strip())
        else:
            spelled.append(part)
    return spelled


def same_in_some_order(left: Sequence[str], right: Sequence[str], equal: Equal) -> bool:
    """Whether each of `left` has a partner of its own in `right`. Fails at the first that has none."""
    free = list(right)
    if len(left) != len(free) or len(left) > MAX_PARTS:
        return False
    for item in left:
        partner = next((i for i, candidate in enumerate(free) if equal(item, candidate)), None)
        if partner is None:
            return False
        del free[partner]
    return True


def matrix(text: str) -> list[list[str]] | None:
    r"""The rows of one matrix or column vector, whatever its brackets; None if this is none. A determinant
    (`vmatrix`) is a number and no matrix."""
    match = _MATRIX.fullmatch(text.strip())
    if match is None or "\\begin" in match[1]:
        return None
    rows = [row for row in re.split(r"\\\\|\\cr(?![a-zA-Z])", match[1]) if row.strip()]
    return [[cell.strip() for cell in row.replace("\\hline", "").split("&")] for row in rows]


def _wraps(text: str) -> bool:
    """Whether the first bracket is closed by the last one: true of `(1, 2]`, not of `(a)(b)`."""
    now = 0
    for position, character in enumerate(text):
        now += (character in OPEN) - (character in CLOSE)
        if now == 0:
            return position == len(text) - 1
    return False
