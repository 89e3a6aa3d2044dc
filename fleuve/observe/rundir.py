"""The run directory: where everything that a run leaves behind lies, and whose it is.

RUN/  config.toml  metrics.jsonl  trace.json  rollouts/  checkpoints/  journal/  logs/  tensorboard/  superseded/
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from fleuve.errors import UserError

_LOCK = ".lock"
_CONFIG_PART = "config.toml.part"


class RunDirectory:
    """Names of the files of one run. Creating one makes no files: `create_run_directory` does."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.config = self.root / "config.toml"
        self.metrics = self.root / "metrics.jsonl"
        self.trace = self.root / "trace.json"
        self.rollouts = self.root / "rollouts"
        self.checkpoints = self.root / "checkpoints"
        self.journal = self.root / "journal"
        self.logs = self.root / "logs"
        self.log = self.logs / "run.log"
        self.tensorboard = self.root / "tensorboard"
        self.moved_to: Path | None = None
        self._lock: int | None = None

    def rollout_file(self, step: int) -> Path:
        """`rollouts/step-000100.jsonl`."""
        return self.rollouts / f"step-{step:06d}.jsonl"

    def lock(self) -> None:
        """Hold the directory until this process ends, so that no second run writes into it.

        Raises:
            UserError: another run holds it.
        """
        fd = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            problem = _held_by(self.root, fd)
            os.close(fd)
            raise UserError(problem) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        self._lock = fd

    def write_config(self, config_toml: str) -> None:
        """The run's settings, as of now."""
        part = self.root / _CONFIG_PART
        with part.open("w", encoding="utf-8") as file:
            file.write(config_toml)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.config)

    def release(self) -> None:
        """Give the directory up before the process ends."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def create_run_directory(path: str | Path, config_toml: str) -> RunDirectory:
    """Make `path` the directory of a new run. Nothing is lost: a run that is there already is moved to `path.1`,
    `path.2`, …, and `moved_to` of the result says where.

    Raises:
        UserError: a run is going on there, or `path` holds something that is not a run, or cannot be written.
    """
    run = RunDirectory(path)
    problem = run_directory_problem(path)
    if problem:
        raise UserError(problem)
    try:
        if run.config.exists():
            run.lock()
            run.moved_to = _free_name(run.root)
            run.root.rename(run.moved_to)
            run.release()
        for folder in (run.root, run.rollouts, run.checkpoints, run.logs):
            folder.mkdir(parents=True, exist_ok=True)
        run.lock()
        run.write_config(config_toml)  # last: without it, what is there is the skeleton of a run
    except OSError as error:
        run.release()
        raise UserError(f"run_dir = {run.root}: cannot be written: {error.strerror}") from None
    return run


def continue_run_directory(path: str | Path) -> RunDirectory:
    """Hold the directory of a run that is there already, to go on with it.

    Raises:
        UserError: a run is going on there, or it cannot be written.
    """
    run = RunDirectory(path)
    try:
        for folder in (run.rollouts, run.checkpoints, run.logs):
            folder.mkdir(exist_ok=True)
        run.lock()
    except OSError as error:
        raise UserError(f"run_dir = {run.root}: cannot be written: {error.strerror}") from None
    return run


def run_directory_problem(path: str | Path) -> str | None:
    """Why a new run cannot be made at `path`, in one line; None if it can. Leaves everything as it was."""
    root = Path(path)
    try:
        return _problem(root)
    except (OSError, ValueError) as error:  # too long a name, no permission to look, a NUL in it
        return f"run_dir = {root}: cannot be looked at: {getattr(error, 'strerror', None) or error}"


def _problem(root: Path) -> str | None:
    if root.exists():
        if not root.is_dir():
            return f"run_dir = {root}: is a file, not a directory"
        if not (root / "config.toml").exists() and not _is_skeleton(root):
            return f"run_dir = {root}: holds files that are not a run's; choose another"
        if held := _held(root):
            return held
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not existing.is_dir():
        return f"run_dir = {root}: {existing} is a file, not a directory"
    if existing == root and (root / "config.toml").exists():
        existing = root.absolute().parent  # a run that is there already is moved aside
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"run_dir = {root}: no permission to write in {existing}"
    try:  # file systems that are none, such as /proc, say no only when asked
        os.rmdir(tempfile.mkdtemp(prefix=".fleuve-", dir=existing))
    except OSError as error:
        return f"run_dir = {root}: no directory can be made in {existing}: {error.strerror}"
    return None


def _is_skeleton(root: Path) -> bool:
    """Whether all in there is what a start leaves that was cut short: nothing of anybody's."""
    run = RunDirectory(root)
    folders = {run.rollouts.name, run.checkpoints.name, run.logs.name}
    files = {_LOCK, _CONFIG_PART}
    return all(
        path.name in files or (path.name in folders and path.is_dir() and not any(path.iterdir()))
        for path in root.iterdir()
    )


def _held(root: Path) -> str | None:
    """Which run has its lock on `root`, as a line for an error; None if none has."""
    try:
        fd = os.open(root / _LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _held_by(root, fd)
    finally:
        os.close(fd)
    return None


def _held_by(root: Path, fd: int) -> str:
    owner = os.read(fd, 32).decode(errors="replace").strip()
    return f"a run is going on in {root} (process {owner}); choose another run_dir"


def _free_name(root: Path) -> Path:
    number = 1
    while (candidate := root.with_name(f"{root.name}.{number}")).exists():
        number += 1
    return candidate
