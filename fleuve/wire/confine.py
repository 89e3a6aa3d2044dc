"""Files that a request may name: those in directories that the server was told of when it was started."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class OutsideError(ValueError):
    """A request named a file that it may not name. One line."""


def confined(path: str, directories: Iterable[Path]) -> Path:
    """`path` without links and dots, if it lies in one of `directories` (not: is one of them). It need not exist.

    Example: in `/runs/a`, both `/runs/a/x` and `/runs/a/y/../x` are `/runs/a/x`; `/runs/a/../b`, `x`, and a link in
    `/runs/a` that leads to `/etc` are refused.

    Raises:
        OutsideError: it is relative, lies elsewhere, or can be no path.
    """
    try:
        given = Path(path)
        real = given.resolve()
        roots = [directory.resolve() for directory in directories]
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, links in a circle
        raise OutsideError(f"{path[:200]!r} can be no path here: {error}") from None
    if not given.is_absolute():
        raise OutsideError(f"{path[:200]!r}: give the whole path")
    if not any(root in real.parents for root in roots):
        allowed = ", ".join(str(root) for root in roots) or "no directory: none was named at the start"
        raise OutsideError(f"{path[:200]!r} is outside of what this server may use: {allowed}")
    return real
