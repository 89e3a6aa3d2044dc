"""What `fleuve train` finds in the run directory, and whether it goes on from there.

Nothing that is there is changed before it is known that the run goes on; `settle` sees to what is in its way then.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from fleuve.config.changes import Changes
from fleuve.config.loader import dump_settings, load_settings
from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.launch.checkpoints import PART, Checkpoint, Checkpoints, candidates, committed, look
from fleuve.launch.history import History
from fleuve.launch.journal import segment_from, segments
from fleuve.observe.earlier import Earlier, missing_reports, reported, take_reports
from fleuve.observe.rundir import RunDirectory, continue_run_directory, create_run_directory

ANEW = "begin anew with --resume no (the run there is moved aside)"


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
            _tidy(run, found[-1].version)
        finally:
            run.release()
    return True


def open_run(settings: Settings, resume: str) -> Opened:
    """`resume`: `auto` goes on with the run that is there, if there is one; `no` moves it aside and begins anew; else
    it is the path of a checkpoint, from which a new run begins.

    Raises:
        UserError: a run is going on there, it cannot be continued with these settings, what it had made is not all
            there, or there is no such checkpoint.
    """
    if resume == "no":
        return _new(settings)
    if resume != "auto":
        return _branch(settings, Path(resume))
    run = RunDirectory(settings.run_dir)
    if not run.config.exists():
        return _new(settings)
    if not (candidates(run.checkpoints) or segments(run.journal)):
        if trace := _trace_of_steps(run):
            raise UserError(
                f"the run in {run.root} cannot be gone on with: checkpoints and journal are gone, but {trace}; "
                f"put them back, or {ANEW}"
            )
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
    copy = run.checkpoints / origin.name
    part = copy.with_name(copy.name + PART)
    shutil.copytree(origin, part)
    part.rename(copy)
    run.journal.mkdir()
    segment_from(run.journal, checkpoint.state().next).touch()  # it begins here: a journal without it lost something
    take_reports(RunDirectory(origin.parent.parent), run, checkpoint.version)
    return _go_on(run, settings, changes)


def _checkpoint_in(path: Path) -> Checkpoint:
    found = look(path.absolute())
    problem = found if isinstance(found, str) else found.damage()
    if problem or isinstance(found, str):
        others = committed(path / "checkpoints") or committed(path)
        hint = f"; did you mean {others[-1].path}?" if others else ""
        raise UserError(f"--resume {path}: no whole checkpoint is there: {problem}{hint}")
    return found


def _trace_of_steps(run: RunDirectory) -> str:
    """What tells that a run had made steps; empty if nothing does."""
    if run.metrics.exists() and run.metrics.stat().st_size:
        return f"{run.metrics.name} tells of steps"
    for folder in (run.rollouts, run.checkpoints):
        if folder.is_dir() and (file := next(folder.iterdir(), None)):
            return f"there is {file.relative_to(run.root)}"
    return ""


def _compare(config: Path, settings: Settings) -> Changes:
    changes = Changes(_settings_of(config), settings)
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


def _settings_of(config: Path) -> Settings:
    try:
        return load_settings(config)
    except UserError as error:
        why = "; ".join(str(error).splitlines())
        raise UserError(
            f"{config}: the settings that the run itself keeps are damaged, and cannot be compared with these ({why}); "
            f"nothing was touched: put the file back, or {ANEW}"
        ) from None


def _go_on(run: RunDirectory, settings: Settings, changes: Changes | None) -> Opened:
    try:
        return _opened(run, settings, changes)
    except BaseException:
        run.release()
        raise


def _opened(run: RunDirectory, settings: Settings, changes: Changes | None) -> Opened:
    history = History(run.checkpoints, run.journal)
    beginning = history.beginning()
    opened = Opened(run, history, continued=True, earlier=reported(run))
    rollouts = settings.observe.rollouts
    if changes is not None:
        opened.notes = changes.taken_over()
        rollouts = rollouts and changes.former.observe.rollouts
        if changes.of_training and history.goes_on:
            opened.former = changes.for_former_steps()
    opened.notes += missing_reports(run, range(1, beginning.version + 1), opened.earlier.steps, rollouts)
    _tidy(run, 0)
    return opened


def _tidy(run: RunDirectory, reached: int) -> None:
    """Without what its last life was writing when it was killed; `reached` is a version that the run has come to."""
    Checkpoints(run.checkpoints, keep=1).tidy(reached)
    for part in run.root.glob(f"*{PART}"):
        part.unlink()
