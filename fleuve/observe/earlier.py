"""What an earlier life of a run has reported: what of it is missing, and what it reported of steps that are no more."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from fleuve.errors import UserError
from fleuve.observe.metrics import metrics_lines, read_metrics
from fleuve.observe.rundir import RunDirectory

_ROLLOUTS = re.compile(r"step-(\d+)\.jsonl")


@dataclass(frozen=True)
class Earlier:
    """`steps` that have a row in `metrics.jsonl`; the seconds that the run had taken by its last."""

    steps: frozenset[int] = frozenset()
    elapsed: float = 0.0


def reported(run: RunDirectory) -> Earlier:
    """What there is of it. A last line of the metrics that was cut off goes.

    Raises:
        UserError: a line is not a step's metrics.
    """
    if not run.metrics.exists():
        return Earlier()
    try:
        rows = read_metrics(run.metrics)
    except UserError as error:
        raise UserError(f"{error}; mend or remove that line to go on") from None
    content = run.metrics.read_bytes()
    os.truncate(run.metrics, content.rfind(b"\n") + 1)
    elapsed = rows[-1].get("time/elapsed") if rows else None
    return Earlier(frozenset(int(row["step"]) for row in rows), float(elapsed or 0.0))


def missing_reports(run: RunDirectory, steps: Collection[int], rows: Collection[int], rollouts: bool) -> list[str]:
    """What there should be of `steps` and is not, a line each: `rows` are there, and `rollouts` should be."""
    files = {step for path in run.rollouts.glob("*.jsonl") if (step := _step_of(path)) is not None}
    lines = []
    if lacking := set(steps).difference(rows):
        lines.append(f"{run.metrics} has no row of {in_words(lacking)}: it was removed, and cannot be made again")
    if rollouts and (lacking := set(steps) - files):
        lines.append(f"{run.rollouts} has nothing of {in_words(lacking)}: it was removed, and cannot be made again")
    return lines


def steps_after(run: RunDirectory, version: int) -> set[int]:
    """The steps after `version` that there are reports of."""
    rows = {row["step"] for row in read_metrics(run.metrics)} if run.metrics.exists() else set()
    files = {step for path in run.rollouts.glob("*.jsonl") if (step := _step_of(path)) is not None}
    return {step for step in rows | files if step > version}


def cut_reports(run: RunDirectory, version: int, put_aside: Callable[[Path], Path]) -> None:
    """Take back what was reported of steps after `version`, to which the run goes back: after a power failure a row can
    be on the disk and what it tells of not. `put_aside` tells where a file of the run is kept instead.

    Who has the metrics open to append to them goes on behind what is left: the file is the same.
    """
    if run.metrics.exists():
        lines = metrics_lines(run.metrics)
        kept = next((i for i, (_, row) in enumerate(lines) if row["step"] > version), len(lines))
        if kept < len(lines):
            with put_aside(run.metrics).open("ab") as file:
                file.writelines(line for line, _ in lines[kept:])
            os.truncate(run.metrics, sum(len(line) for line, _ in lines[:kept]))
    for path in run.rollouts.iterdir():
        step = _step_of(path)
        if step is not None and step > version:
            path.rename(put_aside(path))


def take_reports(origin: RunDirectory, run: RunDirectory, version: int) -> None:
    """What `origin` reported of the steps up to `version`, for `run`, which begins from there. Rollouts are not written
    again: their files are the same, where the file system lets them be."""
    if origin.metrics.exists():
        run.metrics.write_bytes(b"".join(line for line, row in metrics_lines(origin.metrics) if row["step"] <= version))
    for path in origin.rollouts.glob("*.jsonl"):
        step = _step_of(path)
        if step is not None and step <= version:
            link_or_copy(path, run.rollouts / path.name)


def in_words(steps: Collection[int]) -> str:
    """`step 3`, `steps 3 to 7`, `5 of the steps 3 to 12`."""
    first, last = min(steps), max(steps)
    if len(steps) == 1:
        return f"step {first}"
    some = "steps" if len(steps) == last - first + 1 else f"{len(steps)} of the steps"
    return f"{some} {first} to {last}"


def link_or_copy(path: Path, to: Path) -> None:
    """The same file under another name."""
    try:
        os.link(path, to)
    except OSError:
        to.write_bytes(path.read_bytes())


def _step_of(path: Path) -> int | None:
    match = _ROLLOUTS.fullmatch(path.name)
    return int(match[1]) if match else None
