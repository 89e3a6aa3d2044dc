"""What an earlier life of a run has reported, and taking back what it reported too early."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from fleuve.observe.metrics import read_metrics
from fleuve.observe.rundir import RunDirectory

_ROLLOUTS = re.compile(r"step-(\d+)\.jsonl")


@dataclass(frozen=True)
class Earlier:
    """`steps` that have a row in `metrics.jsonl`; the seconds that the run had taken by its last."""

    steps: frozenset[int] = frozenset()
    elapsed: float = 0.0


def reported(run: RunDirectory) -> Earlier:
    """What there is of it. A last line of the metrics that was cut off goes."""
    if not run.metrics.exists():
        return Earlier()
    rows = read_metrics(run.metrics)
    content = run.metrics.read_bytes()
    os.truncate(run.metrics, content.rfind(b"\n") + 1)
    elapsed = rows[-1].get("time/elapsed") if rows else None
    return Earlier(frozenset(int(row["step"]) for row in rows), float(elapsed or 0.0))


def cut_reports(run: RunDirectory, version: int) -> None:
    """Take back what was reported of steps after `version`, to which the run goes back: after a power failure a row can
    be on the disk and what it tells of not.

    Who has the metrics open to append to them goes on behind what is left: the file is the same.
    """
    if run.metrics.exists():
        size = 0
        for line, row in zip(
            run.metrics.read_bytes().splitlines(keepends=True), read_metrics(run.metrics), strict=True
        ):
            if row["step"] > version:
                break
            size += len(line)
        os.truncate(run.metrics, size)
    for path in run.rollouts.iterdir():
        match = _ROLLOUTS.fullmatch(path.name)
        if match and int(match[1]) > version:
            path.unlink()
