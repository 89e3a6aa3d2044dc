"""Collects what is wrong, so that one look tells it all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleuve.errors import UserError


class Problems:
    """Lines of UserErrors, each once, in the order in which they were found."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)

    def catch(self, look: Callable[[], Any]) -> Any:
        """`look()`, or None if it raised a UserError, which is then among the problems."""
        try:
            return look()
        except UserError as error:
            for line in str(error).splitlines():
                self.add(line)
            return None

    def raise_if_any(self) -> None:
        """Raises:
        UserError: there are problems, one line each.
        """
        if self.lines:
            raise UserError("\n".join(self.lines))
