"""A run's past on disk: its last whole checkpoint, and the journal since."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from fleuve.contracts import PromptSource
from fleuve.control.journal import Record
from fleuve.control.past import Past, whole_waves
from fleuve.launch.background import in_background
from fleuve.launch.checkpoints import Checkpoint, committed
from fleuve.launch.journal import first_of, read_journal, segments
from fleuve.types import Batch


class History:
    """Where the past of a run lies."""

    def __init__(self, checkpoints: Path, journal: Path) -> None:
        self._checkpoints = checkpoints
        self._journal = journal

    def open(self, source: PromptSource | None = None, *, whole: bool = False) -> Reading:
        """Read it from the last checkpoint on. `source` is moved along; with `whole` the past ends between two waves
        (`past.whole_waves`)."""
        return Reading(self._newest(), self._journal, source, whole)

    @property
    def goes_on(self) -> bool:
        """Whether the journal tells of anything after the last checkpoint."""
        checkpoint = self._newest()
        first = checkpoint.state().next if checkpoint is not None else 0
        return any(path.stat().st_size > 0 for path in segments(self._journal) if first_of(path) >= first)

    def _newest(self) -> Checkpoint | None:
        found = committed(self._checkpoints)
        return found[-1] if found else None


class Reading:
    """One reading of the past: `batches` goes through it, and `past` is what it has come to by then."""

    def __init__(self, checkpoint: Checkpoint | None, journal: Path, source: PromptSource | None, whole: bool) -> None:
        self.checkpoint = checkpoint
        self.past = Past(source)
        self.next = 0
        """The number of the journal's record after the last that was read."""
        self.steps = 0
        """How many batches there were."""
        if checkpoint is not None:
            for record in checkpoint.records():
                self.past.apply(record)
            self.next = checkpoint.state().next
        records = read_journal(journal, self.next)
        self._records: Iterator[Record] = whole_waves(records, self.past.running) if whole else records

    @property
    def version(self) -> int:
        """That of the past as far as it has been read."""
        return self.past.version

    async def batches(self) -> AsyncIterator[Batch]:
        """The batches of the steps since the checkpoint, in order; the event loop stays free."""
        while (batch := await in_background(self._next_batch)) is not None:
            yield batch

    def read_to_the_end(self) -> None:
        """Pass the batches over that are left."""
        while self._next_batch() is not None:
            pass

    def _next_batch(self) -> Batch | None:
        for record in self._records:
            batch = self.past.apply(record)
            self.next += 1
            if batch is not None:
                self.steps += 1
                return batch
        return None
