"""Files that a command is going to write: whether it can is found out before the work that takes a while."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fleuve.config.nearest import did_you_mean, nearest_path
from fleuve.errors import UserError


def check_output(flag: str, path: Path) -> None:
    """Whether a file can be made, or replaced, at `path`; `flag` is what errors call it.

    Raises:
        UserError: it is a directory or a device, there is no such directory, or nothing can be written there.
    """
    if path.is_dir():
        raise UserError(f"{flag} {path}: is a directory; give the name of a file")
    if path.exists() and not path.is_file():
        raise UserError(f"{flag} {path}: is no ordinary file; give another name")
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: no such directory: {path.parent}{did_you_mean(nearest_path(path.parent))}")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{flag} {path}: cannot be written: there is such a file, which is read-only")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as probe:
            probe.write(b"\n")
            probe.flush()
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written: {error.strerror or error}") from None


def beside(path: Path) -> Path:
    """Where a file is written before it takes its place, so that there is never half of one."""
    return path.with_name(f".{path.name}.{os.getpid()}")
