r"""Multiple choice: the letter that an answer chooses, `C`, `(C)`, `\textbf{(C)}\ 12`, `Option C`."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LABELLED = re.compile(
    r"(?:the\s+)?(?:correct\s+)?(?:(?:option|choice|answer)\s*:?\s*)?"
    r"(?:\(\s*([A-Ja-j])\s*\)|([A-J])\s*[.):]|([A-J])\s*$)\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)
_ANOTHER = re.compile(r"\(\s*[A-J]\s*\)|(?:\b(?:and|or)\b|,)\s*\(?\s*[A-J]\b|^\s*(?:and|or)\b", re.IGNORECASE)


def choice(text: str) -> tuple[str, str] | None:
    """The letter chosen, in upper case, and the text of the choice if it is given too; None if this chooses none, or
    several.

    >>> choice("(C) 12 cm"), choice("c"), choice("A or B")
    (('C', '12 cm'), ('C', ''), None)
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip()
    match = _LABELLED.fullmatch(text)
    if match is None or _ANOTHER.search(match[4]):
        return None
    return (match[1] or match[2] or match[3]).upper(), match[4].strip()


def offered(letter: str, choices: Sequence[str]) -> str | None:
    """The text of the choice with this letter; None if there is none."""
    index = ord(letter) - ord("A")
    return choices[index] if 0 <= index < len(choices) else None
