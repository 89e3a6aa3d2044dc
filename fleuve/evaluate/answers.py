"""One answer and its verdict, and the file that every one of them goes to as it comes."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import msgspec

from fleuve.types import FinishReason

SOLVED = 0.5
"""An answer with a score above this counts as solved, as in training."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer and its verdict: a line of the evaluation's JSONL file. `tokens` counts the answer's; `part` is the
    value of the row's field that the numbers are broken down by ("" without one)."""

    problem: str
    sample: int
    prompt: str
    reference: str
    text: str
    verifier: str
    score: float | None
    reason: str
    tokens: int
    finish_reason: FinishReason
    versions: list[int]
    part: str = ""


class AnswerFile:
    """JSON lines, written one by one: whatever ends an evaluation, what was scored until then is there."""

    def __init__(self, path: Path) -> None:
        """Raises:
        OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, and a line is one write: a process that is killed leaves whole lines.
        self._file = path.open("wb", buffering=0)

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, answer: Answer) -> None:
        """Raises:
        OSError: it cannot be written, such as on a full disk.
        """
        line = memoryview(msgspec.json.encode(answer) + b"\n")
        while line:
            line = line[self._file.write(line) :]
