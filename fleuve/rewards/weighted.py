"""Several rewards in one: `math + 0.1*rewards:brief - 0.5*exact`, read into weights and names.

A name is a built-in verifier's, your own `module:function`, or a regular expression in backquotes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from fleuve.errors import UserError

_TERM = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)\s*\*\s*)?(`[^`]+`|[^\s`*+-]+)\s*")


class Term(NamedTuple):
    """One reward and what its score is multiplied by."""

    weight: float
    name: str


@functools.lru_cache(maxsize=1024)
def terms(verifier: str) -> tuple[Term, ...]:
    """The parts of a weighted sum, of which there may be one alone.

    >>> terms("math + 0.1*rewards:brief")
    (Term(weight=1.0, name='math'), Term(weight=0.1, name='rewards:brief'))

    Raises:
        UserError: it is no sum of names.
    """
    found: list[Term] = []
    sign, position = 1.0, 0
    while True:
        match = _TERM.match(verifier, position)
        if match is None:
            rest = verifier[position:].strip() or "its end"
            raise UserError(f"data.verifier = {verifier}: a verifier's name is missing at {rest}")
        found.append(Term(sign * float(match[1] or 1), match[2]))
        position = match.end()
        if position == len(verifier):
            return tuple(found)
        if verifier[position] not in "+-":
            raise UserError(
                f"data.verifier = {verifier}: {verifier[position:]!r} is not expected; "
                "rewards are added up as in math + 0.1*rewards:brief"
            )
        sign = 1.0 if verifier[position] == "+" else -1.0
        position += 1


def names(verifiers: Iterable[str]) -> tuple[str, ...]:
    """Every single verifier in these sums, once."""
    return tuple(dict.fromkeys(term.name for verifier in verifiers for term in terms(verifier)))
