"""The nearest right thing to a wrong word or path, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like `word`, whatever its capitals, or None if none resembles it."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(suggestion: str | None) -> str:
    """`; did you mean X?`, or nothing."""
    return f"; did you mean {suggestion}?" if suggestion else ""


def nearest_path(path: str | Path, suffixes: Iterable[str] = ()) -> str | None:
    """An existing neighbour of a path that does not exist: same folder, a similar name with one of `suffixes` (if any).

    If the folder itself is missing, its nearest neighbour is tried in its place.
    """
    path = Path(path)
    folder = path.parent
    if not folder.is_dir():
        if folder == folder.parent:
            return None
        other = nearest_path(folder)
        if other is None or not Path(other).is_dir():
            return None
        folder = Path(other)
    wanted = tuple(suffixes)
    names = [entry.name for entry in folder.iterdir() if not wanted or entry.name.endswith(wanted)]
    if path.name in names:
        return str(folder / path.name)
    by_stem = {Path(name).stem: name for name in sorted(names, key=lambda name: Path(name).suffix == path.suffix)}
    match = nearest(path.stem, by_stem)
    return str(folder / by_stem[match]) if match else None
