"""What `fleuve train` finds in the run directory, and whether it goes on from there."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from fleuve.config.changes import Changes
from fleuve.config.loader import dump_settings, load_settings
from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.launch.checkpoints import PART, Checkpoint, Checkpoints, checkpoint_at, committed
from fleuve.launch.history import History
from fleuve.launch.journal import segments
from fleuve.observe.earlier import Earlier, reported
from fleuve.observe.rundir import RunDirectory, continue_run_directory, create_run_directory


@dataclass
class Opened:
    """A run directory that this process holds. What its past comes to is known once its `history` has been read."""

    run: RunDirectory
    history: History
    former: Settings | None = None
    """The settings of its last life, where they differ in what a step depends on."""
    continued: bool = False
    earlier: Earlier = field(default_factory=Earlier)
    notes: list[str] = field(default_factory=list)

    def words(self) -> list[str]:
        """What the user should know of it, a line each."""
        if not self.continued:
            return []
        return [f"going on with the run in {self.run.root}", *self.notes]


def finished(settings: Settings) -> bool:
    """Whether the run that is there has made all of its steps. If so, what it was removing when it was killed goes."""
    found = committed(RunDirectory(settings.run_dir).checkpoints)
    if not found or found[-1].version < settings.steps:
        return False
    with contextlib.suppress(UserError, OSError):  # its process is about to end, or nothing can be written there
        run = continue_run_directory(settings.run_dir)
        try:
            _tidy(run)
        finally:
            run.release()
    return True


def open_run(settings: Settings, resume: str) -> Opened:
    """`resume`: `auto` goes on with the run that is there, if there is one; `no` moves it aside and begins anew; else
    it is the path of a checkpoint, from which a new run begins.

    Raises:
        UserError: a run is going on there, it cannot be continued with these settings, or there is no such checkpoint.
    """
    if resume == "no":
        return _new(settings)
    if resume != "auto":
        return _branch(settings, Path(resume))
    run = RunDirectory(settings.run_dir)
    if not run.config.exists() or not (committed(run.checkpoints) or segments(run.journal)):
        return _new(settings)
    changes = _compare(run.config, settings)
    run = continue_run_directory(settings.run_dir)
    return _go_on(run, settings, changes)


def _new(settings: Settings) -> Opened:
    run = create_run_directory(settings.run_dir, dump_settings(settings))
    return Opened(run, History(run.checkpoints, run.journal))


def _branch(settings: Settings, path: Path) -> Opened:
    """A new run with a copy of the checkpoint as its own."""
    checkpoint = _checkpoint_in(path)
    config = checkpoint.path.parent.parent / "config.toml"
    changes = _compare(config, settings) if config.exists() else None
    origin = checkpoint.path.absolute()
    run = create_run_directory(settings.run_dir, dump_settings(settings))
    root = run.root.absolute()
    if run.moved_to is not None and origin.is_relative_to(root):
        origin = run.moved_to.absolute() / origin.relative_to(root)
    shutil.copytree(origin, run.checkpoints / origin.name)
    metrics = origin.parent.parent / run.metrics.name
    if metrics.exists():
        shutil.copyfile(metrics, run.metrics)
    return _go_on(run, settings, changes)


def _checkpoint_in(path: Path) -> Checkpoint:
    checkpoint = checkpoint_at(path.absolute())
    if checkpoint is None:
        found = committed(path / "checkpoints") or committed(path)
        hint = f"; did you mean {found[-1].path}?" if found else ""
        raise UserError(f"--resume {path}: no whole checkpoint is there{hint}")
    return checkpoint


def _compare(config: Path, settings: Settings) -> Changes:
    changes = Changes(load_settings(config), settings)
    if refused := changes.refused():
        raise UserError(
            "\n".join(
                [
                    f"the run in {settings.run_dir} cannot be continued with these settings:",
                    *refused,
                    "start anew with --resume no (the run there is moved aside), or choose another run_dir",
                ]
            )
        )
    return changes


def _go_on(run: RunDirectory, settings: Settings, changes: Changes | None) -> Opened:
    _tidy(run)
    history = History(run.checkpoints, run.journal)
    opened = Opened(run, history, continued=True, earlier=reported(run))
    if changes is not None:
        opened.notes = changes.taken_over()
        if changes.of_training and history.goes_on:
            opened.former = load_settings(run.config)
    return opened


def _tidy(run: RunDirectory) -> None:
    """Without what its last life was writing when it was killed."""
    Checkpoints(run.checkpoints, keep=1).tidy()
    for part in run.root.glob(f"*{PART}"):
        part.unlink()
