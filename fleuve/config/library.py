"""Libraries that only some settings need."""

from __future__ import annotations

import importlib.util

from fleuve.errors import UserError


def require(name: str, line: str) -> None:
    """
    Raises:
        UserError: there is no library `name` here; says `line`.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a directory that happens to have the name has no origin
        raise UserError(line)
