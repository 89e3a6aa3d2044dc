"""The file operations of checkpoints and journals, each one a step that a crash can come before, after or within.

Everything that must outlive a crash goes through here, so that tests can put another file system in its place and cut
the sequence of operations at every point.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class Files:
    """The real file system. Every method raises OSError where the system says no."""

    def make_directory(self, path: Path) -> None:
        """With its parents; it may be there already."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, parts: list[bytes]) -> None:
        """A new file, its content on the disk when this returns; its name only after `sync` of the directory."""
        with path.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, directory: Path) -> None:
        """The directory's names are on the disk when this returns."""
        opened = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

    def rename(self, old: Path, new: Path) -> None:
        """In one go; `new` is not there yet, or is a file."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """A file, or a directory and all in it; it may be gone already."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
