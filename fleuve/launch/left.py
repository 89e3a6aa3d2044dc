"""What a run that failed leaves to go on from."""

from __future__ import annotations

from fleuve.errors import UserError
from fleuve.launch.checkpoints import committed
from fleuve.launch.history import History
from fleuve.observe.rundir import RunDirectory


def what_is_left(run: RunDirectory) -> str:
    """The newest checkpoint, and how far the journal leads from there, in a line. Reads both."""
    try:
        reading = History(run.checkpoints, run.journal).open()
        reading.read_to_the_end()
    except (UserError, OSError):
        newest = next(reversed(committed(run.checkpoints)), None)
        return f"{_saved(newest and newest.path)}; what the run came to is in {run.root}"
    saved = _saved(reading.checkpoint and reading.checkpoint.path)
    if reading.version > reading.beginning.version:
        return f"{saved}; the journal leads to version {reading.version}: started again, the run goes on from there"
    return saved if reading.checkpoint else f"{saved}, and no step was made; the run is in {run.root}"


def _saved(path: object) -> str:
    return "no checkpoint is saved" if path is None else f"saved: {path}"
