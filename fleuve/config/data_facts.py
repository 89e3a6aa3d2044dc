"""What can be known of a data set in about half a second: are its rows sound, how long is its longest prompt."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from fleuve.config.light_tokenizer import LightTokenizer
from fleuve.config.settings import DataSettings
from fleuve.data.open import PROCEDURAL, read_rows
from fleuve.data.render import prompt_ids, prompt_text, question, row_verifier
from fleuve.data.rows import Row

SECONDS = 0.5
"""After these no more rows are looked at, unless they are among the first `ROWS`."""
ROWS = 20_000
PROCEDURAL_ROWS = 500
LONGEST = 64
"""So many prompts, the longest in characters, are tokenised; the one longest in tokens is among them."""


@dataclass(frozen=True)
class DataFacts:
    """`rows` were looked at (`complete`: all there are; `endless`: there is no end of them). `longest` is the longest
    prompt in tokens, and `where` it is; None if the tokenizer cannot be read without transformers. `verifiers` compare
    answers to these rows, each with the first row that it does so for; `slowest` is the longest `time_limit` of a row
    in seconds of CPU time (0: none has one), and where it is."""

    rows: int
    complete: bool
    longest: int | None
    where: str
    endless: bool = False
    verifiers: dict[str, str] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")

    def __str__(self) -> str:
        """The extent, and plainly what was not looked at."""
        length = "prompt lengths not checked" if self.longest is None else f"longest prompt {self.longest} tokens"
        if self.complete:
            return f"{self.rows:,} rows, {length}" + (" (all checked)" if self.longest is not None else "")
        extent = "endless, the first" if self.endless else "only the first"
        there = "" if self.longest is None else " of these"
        return f"{extent} {self.rows:,} rows checked, {length}{there}"


def inspect_data(
    path: str, data: DataSettings, tokenizer: LightTokenizer | None, completion_field: str | None = None
) -> DataFacts:
    """Read rows, check their fields, and measure the longest prompts with `tokenizer` (None: not measured).

    Raises:
        UserError: no such file (names the nearest), empty, a line that is not JSON, a row without a field.
    """
    endless = path.startswith(PROCEDURAL)
    rows = _Few(read_rows(path, data, completion_field), data, endless)
    candidates = heapq.nlargest(LONGEST, rows, key=lambda row: len(question(row, data)))
    if tokenizer is None:
        return DataFacts(rows.count, rows.complete, None, "", endless, rows.verifiers, rows.slowest)
    longest, where = 0, ""
    for row in candidates:
        length = len(prompt_ids(prompt_text(row, data, tokenizer), data, tokenizer))
        if length > longest:
            longest, where = length, row.where
    return DataFacts(rows.count, rows.complete, longest, where, endless, rows.verifiers, rows.slowest)


class _Few:
    """Rows, as many as there is time for; `count` and `complete` say how many these were, the rest what they name."""

    def __init__(self, rows: Iterator[Row], data: DataSettings, endless: bool) -> None:
        self._rows = rows
        self._data = data
        self._endless = endless
        self.count = 0
        self.complete = False
        self.verifiers: dict[str, str] = {}
        self.slowest = (0.0, "")

    def __iter__(self) -> Iterator[Row]:
        until = time.monotonic() + SECONDS
        limit = PROCEDURAL_ROWS if self._endless else ROWS
        for row in itertools.islice(self._rows, limit):
            self._take(row)
            yield row
        if self._endless:
            return
        for row in self._rows:
            if time.monotonic() > until:
                return
            self._take(row)
            yield row
        self.complete = True

    def _take(self, row: Row) -> None:
        self.count += 1
        self.verifiers.setdefault(row_verifier(row, self._data), row.where)
        limit = row.fields.get("time_limit")
        if isinstance(limit, int | float) and limit > self.slowest[0]:
            self.slowest = (float(limit), row.where)
