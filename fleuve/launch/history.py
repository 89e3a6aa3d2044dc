"""A run's past on disk: its last whole checkpoint, and the journal since.

Damage is found by checksums. A run goes on from an earlier checkpoint than its newest only where the journal has what
followed, and from no checkpoint only where the journal has everything: what was made is not lost without a word.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fleuve.contracts import PromptSource
from fleuve.control.journal import Record
from fleuve.control.past import Past, whole_waves
from fleuve.errors import UserError
from fleuve.launch.background import in_background
from fleuve.launch.checkpoints import COMMITTED, Checkpoint, candidates, look
from fleuve.launch.journal import JournalReader, first_of, segment_from, segments
from fleuve.types import Batch


@dataclass(frozen=True)
class Beginning:
    """Where a run goes on from: `checkpoint`, or the first record of the journal. `unusable` are the newer directories
    that are none, each with the reason."""

    checkpoint: Checkpoint | None = None
    unusable: dict[Path, str] = field(default_factory=dict)

    @property
    def version(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.version

    @property
    def record(self) -> int:
        """The number of the first record of the journal after it."""
        return 0 if self.checkpoint is None else self.checkpoint.state().next


class History:
    """Where the past of a run lies. Its methods read files, which takes a while where checkpoints are large."""

    def __init__(self, checkpoints: Path, journal: Path) -> None:
        self._checkpoints = checkpoints
        self._journal = journal
        self._sound: set[tuple[Path, int]] = set()  # that were read before, with the time of their markers

    def beginning(self) -> Beginning:
        """
        Raises:
            UserError: what was made cannot be reached from what is left of it.
        """
        unusable: dict[Path, str] = {}
        for path in reversed(candidates(self._checkpoints)):
            found = look(path)
            problem = found if isinstance(found, str) else self._damage(found)
            if problem or isinstance(found, str):
                unusable[path] = problem
                continue
            beginning = Beginning(found, unusable)
            if unusable and not segment_from(self._journal, beginning.record).exists():
                raise UserError(self._unreachable(beginning))
            return beginning
        first = next((first_of(path) for path in segments(self._journal)), None)
        if first == 0 or (first is None and not unusable):
            return Beginning(None, unusable)
        raise UserError(self._nothing_whole(unusable, first))

    def open(self, source: PromptSource | None = None, *, whole: bool = False) -> Reading:
        """Read it from the last checkpoint on. `source` is moved along; with `whole` the past ends between two waves
        (`past.whole_waves`).

        Raises:
            UserError: see `beginning`.
        """
        beginning = self.beginning()
        self._sound.clear()  # what is whole now may not be the next time
        return Reading(beginning, self._journal, source, whole)

    @property
    def goes_on(self) -> bool:
        """Whether the journal tells of anything after the last checkpoint."""
        first = self.beginning().record
        return any(path.stat().st_size > 0 for path in segments(self._journal) if first_of(path) >= first)

    def _damage(self, checkpoint: Checkpoint) -> str:
        try:
            key = checkpoint.path, (checkpoint.path / COMMITTED).stat().st_mtime_ns
        except OSError as error:
            return f"{COMMITTED} cannot be read: {error.strerror}"
        if key in self._sound:
            return ""
        if problem := checkpoint.damage():
            return problem
        try:
            checkpoint.state()
        except UserError as error:
            return str(error)
        self._sound.add(key)
        return ""

    def _unreachable(self, beginning: Beginning) -> str:
        assert beginning.checkpoint is not None
        path = beginning.checkpoint.path
        return (
            f"{self._run}: {_listed(beginning.unusable)}, and the journal from {path.name} on "
            f"({segment_from(self._journal, beginning.record).name}) is missing; nothing was touched: "
            f"--resume {path} goes on from version {beginning.version}, --resume no begins anew; both move the run "
            "aside"
        )

    def _nothing_whole(self, unusable: dict[Path, str], first: int | None) -> str:
        journal = "there is no journal" if first is None else f"the journal begins with record {first}"
        checkpoints = _listed(unusable) if unusable else f"there is no checkpoint in {self._checkpoints}"
        return (
            f"{self._run} cannot be gone on with: {checkpoints}, and {journal}; nothing was touched: put back what is "
            "missing, or begin anew with --resume no, or from another checkpoint with --resume PATH; both move the run "
            "aside"
        )

    @property
    def _run(self) -> Path:
        return self._checkpoints.parent


def _listed(unusable: dict[Path, str]) -> str:
    return ", ".join(f"{path.name} is not whole ({problem})" for path, problem in unusable.items())


class Reading:
    """One reading of the past: `batches` goes through it, and `past` is what it has come to by then."""

    def __init__(self, beginning: Beginning, journal: Path, source: PromptSource | None, whole: bool) -> None:
        self.beginning = beginning
        self.past = Past(source)
        self.next = beginning.record
        """The number of the journal's record after the last that was read."""
        self.steps = 0
        """How many batches there were."""
        self.journal_is_missing = not segment_from(journal, self.next).exists()
        for record in beginning.checkpoint.records() if beginning.checkpoint is not None else ():
            self.past.apply(record)
        self._reader = JournalReader(journal, self.next)
        records = iter(self._reader)
        self._records: Iterator[Record] = whole_waves(records, self.past.running) if whole else records

    @property
    def checkpoint(self) -> Checkpoint | None:
        """That it began with."""
        return self.beginning.checkpoint

    @property
    def broken(self) -> Path | None:
        """The journal's segment that lost a record, though it goes on behind that. Known at the end."""
        return self._reader.broken

    @property
    def lost(self) -> int:
        """The number of that record."""
        return self._reader.next

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
