"""What the lives of a run that is killed and continued have in common: the data, and what outlives each of them."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from fleuve.control.journal import Record
from fleuve.data.rows import Row
from fleuve.data.source import FilePasses, RowSource
from fleuve.types import Prompt

ROWS = 25


def make_prompt(id: str, row: Row) -> Prompt:
    return Prompt(id=id, input_ids=[1, 2], text="", answer="")


def open_source(seed: int) -> RowSource:
    return RowSource(FilePasses([Row(str(n), {}) for n in range(ROWS)], "rows", seed, shuffle=True), make_prompt)


def all_prompts(count: int, seed: int) -> Counter[str]:
    source = open_source(seed)
    return Counter(source.next().id for _ in range(count))


@dataclass
class Memory:
    """A journal, and the checkpoints made beside it: (number of records then, the snapshot)."""

    records: list[Record] = field(default_factory=list)
    checkpoints: list[tuple[int, list[Record]]] = field(default_factory=list)

    @property
    def next(self) -> int:
        return len(self.records)

    def write(self, record: Record) -> None:
        self.records.append(copy.deepcopy(record))

    def cut(self, at: int) -> list[Record]:
        """What there is to go on from when the process dies after record `at`: the last checkpoint and what follows."""
        whole = [c for c in self.checkpoints if c[0] <= at]
        position, snapshot = whole[-1] if whole else (0, [])
        return [*snapshot, *self.records[position:at]]
