"""What is in the way of a run that goes on, once it is known how far its past reaches.

What its last life left half-made goes. What cannot be made again is kept, in `RUN/superseded/1`, `2`, …: reports of
steps that the journal does not lead to, checkpoints that are not whole, and what follows damage in the journal.
"""

from __future__ import annotations

from pathlib import Path

from fleuve.launch.checkpoints import Checkpoints, candidates, look
from fleuve.launch.history import Reading
from fleuve.launch.journal import first_of, segments
from fleuve.observe.earlier import cut_reports, in_words, link_or_copy, steps_after
from fleuve.observe.rundir import RunDirectory

SUPERSEDED = "superseded"


class Aside:
    """The next free `RUN/superseded/N`; made when there is something to put there."""

    def __init__(self, run: RunDirectory) -> None:
        self._root = run.root
        number = 1
        while (directory := run.root / SUPERSEDED / str(number)).exists():
            number += 1
        self.directory = directory

    @property
    def used(self) -> bool:
        """Whether there is anything."""
        return self.directory.exists()

    def place(self, path: Path) -> Path:
        """Where `path`, which is in the run directory, belongs."""
        place = self.directory / path.relative_to(self._root)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place


def settle(run: RunDirectory, reading: Reading) -> list[str]:
    """Make way for a run that goes on from the end of `reading`; what is said of it, a line each.

    Raises:
        OSError: the disk is full. What was not put aside yet is where it was.
    """
    aside = Aside(run)
    notes = []
    lost = steps_after(run, reading.version)
    Checkpoints(run.checkpoints, keep=1).tidy(reading.version)
    if unusable := {path.name: why for path, why in reading.beginning.unusable.items() if path.exists()}:
        notes.append(_not_whole(unusable, reading))
    if reading.broken is not None:
        notes.append(
            f"{reading.broken} is damaged: record {reading.lost} is lost, and what came after it cannot be used; the "
            f"run goes on from there, at version {reading.version}"
        )
    elif reading.journal_is_missing:
        notes.append(
            f"{run.journal} tells nothing of what came after version {reading.version}: the run goes on from there"
        )
    if lost:
        notes.append(f"{in_words(lost)} had been reported, and cannot be reached any more: made anew")
    for path in candidates(run.checkpoints):
        if path.name in unusable or isinstance(look(path), str):
            path.rename(aside.place(path))
    if reading.broken is not None:
        _settle_journal(run, reading, reading.broken, aside)
    cut_reports(run, reading.version, aside.place)
    if aside.used:
        notes.append(f"what cannot be used any more is kept in {aside.directory}")
    return notes


def _not_whole(unusable: dict[str, str], reading: Reading) -> str:
    what = ", ".join(f"{name} ({why})" for name, why in sorted(unusable.items()))
    begin = reading.checkpoint.path.name if reading.checkpoint is not None else "the beginning"
    return f"not whole: {what}; the run goes on from {begin} and the journal since, to version {reading.version}"


def _settle_journal(run: RunDirectory, reading: Reading, broken: Path, aside: Aside) -> None:
    for path in segments(run.journal):
        if first_of(path) >= reading.next:
            path.rename(aside.place(path))
    if broken.exists():  # the run goes on from a part of it
        link_or_copy(broken, aside.place(broken))
