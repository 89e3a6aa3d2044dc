"""What an earlier life of a run has reported, and taking back what it reported too early."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleuve.observe.metrics import read_metrics
from fleuve.observe.rundir import RunDirectory

_ROLLOUTS = re.compile(r"step-(\d+)\.jsonl")


@dataclass(frozen=True)
class Earlier:
    """`steps` that have a row in `metrics.jsonl`; the seconds that the run had taken by its last."""

    steps: frozenset[int] = frozenset()
    elapsed: float = 0.0


def keep_until(run: RunDirectory, version: int) -> Earlier:
    """Cut the run's reports after `version`, to which it goes back; what is left.

    After a power failure a row can be on the disk and what it tells of not. A line that was cut off goes too.
    """
    if not run.metrics.exists():
        return Earlier()
    rows = read_metrics(run.metrics)
    kept = [row for row in rows if row["step"] <= version]
    text = b"".join(msgspec.json.encode(row) + b"\n" for row in kept)
    if len(kept) < len(rows) or not run.metrics.read_bytes().endswith(b"\n"):
        _replace(run.metrics, text)
    for path in run.rollouts.iterdir():
        match = _ROLLOUTS.fullmatch(path.name)
        if match and int(match[1]) > version:
            path.unlink()
    elapsed = kept[-1].get("time/elapsed") if kept else None
    return Earlier(frozenset(int(row["step"]) for row in kept), float(elapsed or 0.0))


def _replace(path: Path, text: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(text)
    os.replace(part, path)
