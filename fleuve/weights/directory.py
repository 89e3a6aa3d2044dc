"""Where published weights lie: a directory of this run's own, in shared memory or under a path that all sides see.

The process that makes the directory holds a file lock in it for as long as it lives, and so does the one that writes
the weights: either may outlive the other. So whoever starts later can tell a dead run's leftovers from a living run's
directory, whatever pid namespace it lives in and whatever the clock says, and sweep them away.

A directory is there for a moment before its maker's lock is. Should it be swept in that moment, its maker notices, and
makes another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LOCK = "owner.lock"
MAKER = "maker.lock"

_OURS = re.compile(r"fleuve-\d+-\w+")


def make_directory(path: str | None = None) -> Path:
    """A new directory `fleuve-<pid>-<random>` for one run's weights, this process's until it ends; sweeps what dead
    runs left beside it.

    Args:
        path: the parent directory (created if absent); None is shared memory, or the temporary directory where the
            system has no shared memory file system.
    """
    parent = Path(path) if path is not None else shared_memory()
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    while True:
        made = Path(tempfile.mkdtemp(prefix=f"fleuve-{os.getpid()}-", dir=parent))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # somebody sweeps it away
            claim(made, MAKER)
            return made


def shared_memory() -> Path:
    """The file system that lives in memory, or the temporary directory where there is none."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def claim(directory: Path, name: str = LOCK) -> int:
    """Hold `directory`, as the one that writes in it (LOCK) or that made it (MAKER), until the returned file descriptor
    is closed, or this process ends.

    Raises:
        BlockingIOError: another living process holds it so, or sweeps it away.
        FileNotFoundError: it was swept away.
    """
    lock = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink == 0:  # who swept it held the lock until then
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory / name))
    except BaseException:
        os.close(lock)
        raise
    return lock


def sweep(parent: Path) -> list[Path]:
    """Remove the weight directories under `parent` whose owners are dead; returns them. Those of others' are left."""
    swept = []
    for directory in parent.iterdir():
        if _OURS.fullmatch(directory.name) and _remove_abandoned(directory):
            swept.append(directory)
    return swept


def _remove_abandoned(directory: Path) -> bool:
    """Whether nobody held it, and it is gone. It is held here meanwhile, so that nobody begins to live in it."""
    with contextlib.ExitStack() as held:
        try:
            if not directory.is_dir() or directory.stat().st_uid != os.getuid():
                return False
            for name in (MAKER, LOCK):
                held.callback(os.close, claim(directory, name))
        except OSError:
            return False
        shutil.rmtree(directory, ignore_errors=True)
        return not directory.exists()
