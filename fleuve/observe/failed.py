"""The batches of steps in which an update had to be skipped, kept for `fleuve replay-step`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from fleuve.errors import UserError
from fleuve.types import Batch, decode, encode

KEPT = 8
"""Batches, the newest: each is as large as what the step trained."""

COUNT = "loss/skipped_nonfinite"
"""The metric that says how many updates of a step were skipped for a NaN or an infinity."""


class FailedStep(msgspec.Struct, kw_only=True):
    """The step that made `batch.version + 1`, with what is needed to take it again, but for the weights. `unchanged`:
    no update took place in it, so that it left the weights as they were."""

    settings: dict[str, Any]
    batch: Batch
    unchanged: bool
    metrics: dict[str, float]

    @property
    def step(self) -> int:
        """Its number."""
        return self.batch.version + 1


def failed_directory(run: Path) -> Path:
    """`RUN/failed`."""
    return run / "failed"


def failed_file(run: Path, step: int) -> Path:
    """`RUN/failed/step-000012.msgpack`."""
    return failed_directory(run) / f"step-{step:06d}.msgpack"


def save_failed(run: Path, settings: dict[str, Any], batch: Batch, metrics: dict[str, float]) -> Path:
    """Keep `batch`, whose step had `metrics`; the oldest beyond `KEPT` goes.

    Raises:
        OSError: it cannot be written. Nothing half-written is left under its name.
    """
    # A step with an update has that update's loss.
    failed = FailedStep(settings=settings, batch=batch, unchanged="loss/grad_norm" not in metrics, metrics=metrics)
    path = failed_file(run, failed.step)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    try:
        part.write_bytes(encode(failed))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    for old in failed_files(run)[:-KEPT]:
        old.unlink()
    return path


def failed_files(run: Path) -> list[Path]:
    """Those that are there, oldest step first."""
    return sorted(failed_directory(run).glob("step-*.msgpack"))


def read_failed(path: Path) -> FailedStep:
    """What `save_failed` wrote.

    Raises:
        UserError: there is no such file, or it is something else.
    """
    try:
        return decode(path.read_bytes(), FailedStep)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: is no batch of a failed step: {error}") from None
