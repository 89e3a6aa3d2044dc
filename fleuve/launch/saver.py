"""Checkpoints of a run as a whole: the trainer's part, the controller's part, and the journal that goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleuve.contracts import Trainer, TrainerError
from fleuve.control.journal import Record
from fleuve.launch.checkpoints import Checkpoints
from fleuve.launch.journal import JournalFile


class Saver:
    """Makes them. The snapshot is taken by the caller in the same turn of the event loop, so that the journal's next
    segment begins exactly there."""

    def __init__(
        self, checkpoints: Checkpoints, trainer: Trainer, journal: JournalFile, note: Callable[[str], None]
    ) -> None:
        self._checkpoints = checkpoints
        self._trainer = trainer
        self._journal = journal
        self._note = note

    async def save(self, version: int, snapshot: list[Record]) -> Path:
        """The checkpoint of `version`, whole.

        Raises:
            OSError, TrainerError: it could not be written; the earlier ones are as they were.
        """
        self._journal.begin_segment()
        path = await self._checkpoints.save(version, self._trainer, snapshot)
        self._journal.forget_before(self._checkpoints.oldest_record())
        self._note(f"checkpoint {path}")
        return path

    async def save_or_note(self, version: int, snapshot: list[Record]) -> None:
        """The same, or a note of what was in the way: the run goes on with the earlier one."""
        try:
            await self.save(version, snapshot)
        except (OSError, TrainerError) as error:
            self._note(f"no checkpoint of version {version}: {error}; the earlier ones are kept, and the run goes on")
