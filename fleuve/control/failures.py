"""Groups that come to nothing: whose prompt is worth another try, and when it is not the prompts any more."""

from __future__ import annotations

from collections import Counter

ATTEMPTS = 2
"""How often a prompt is tried whose groups fail, before it is given up."""


class Failures:
    """Counts failed groups by prompt. A pure state machine."""

    def __init__(self) -> None:
        self._attempts: Counter[str] = Counter()
        self._in_a_row: set[str] = set()

    @property
    def in_a_row(self) -> int:
        """Different prompts whose groups failed since a group last succeeded. One bad prompt alone counts once."""
        return len(self._in_a_row)

    def failed(self, prompt: str) -> bool:
        """A group of `prompt` failed; whether the prompt should be tried again."""
        self._in_a_row.add(prompt)
        self._attempts[prompt] += 1
        if self._attempts[prompt] < ATTEMPTS:
            return True
        del self._attempts[prompt]
        return False

    def succeeded(self, prompt: str) -> None:
        """A group of `prompt` came through."""
        self._in_a_row.clear()
        self._attempts.pop(prompt, None)
