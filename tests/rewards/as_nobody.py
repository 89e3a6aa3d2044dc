"""Started by root: `python as_nobody.py FOLDER WORDS...` becomes nobody and runs `python -m pytest WORDS` with FOLDER
for its files. What nobody could not reach of Python and of this repository (because it lies in root's home) is shown to
it, in a mount namespace of its own: nothing of the machine is changed.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fleuve.rewards.sandbox import syscalls  # noqa: E402
from fleuve.rewards.sandbox.level import choose, describe  # noqa: E402

NOBODY = 65534
MAY_NOT_MOUNT = 77


def main() -> None:
    folder, *words = sys.argv[1:]
    try:
        syscalls.unshare(syscalls.NEW_MOUNTS)
        syscalls.make_private()
    except OSError as error:
        print(error)
        sys.exit(MAY_NOT_MOUNT)
    show({Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT.resolve()})
    os.chown(folder, NOBODY, NOBODY)
    os.chdir(ROOT)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    print(describe(choose("auto", False)), flush=True)
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "not slow and not vllm and not ray",
        "-p",
        "no:cacheprovider",
        f"--basetemp={folder}/tests",
        *words,
    ]
    os.execve(sys.executable, arguments, environment)


def show(paths: set[Path]) -> None:
    """Cover the closed folders above these by empty open ones, with nothing but these in them."""
    hidden = {path: closed for path in paths if (closed := closed_above(path)) is not None}
    held = {path: os.open(path, os.O_PATH) for path in hidden}
    for closed in set(hidden.values()):
        syscalls.mount_tmpfs(str(closed), "mode=755,size=1m")
    for path, descriptor in sorted(held.items()):
        path.mkdir(parents=True, exist_ok=True)
        syscalls.bind(f"/proc/self/fd/{descriptor}", str(path))
        os.close(descriptor)


def closed_above(path: Path) -> Path | None:
    """The uppermost folder on the way that others may not pass through."""
    for folder in reversed([path, *path.parents]):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


if __name__ == "__main__":
    main()
