"""Metrics of each step: one JSON object a line, and TensorBoard's event file. Neither needs torch."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleuve.errors import UserError


class MetricsFile:
    """`metrics.jsonl`. Every line is whole and on disk when `write` returns; NaN and infinities become null."""

    def __init__(self, path: Path) -> None:
        self._file = WholeWrites(path)

    def write(self, metrics: Mapping[str, float]) -> None:
        """One step. Whole numbers are written without a decimal point.

        Raises:
            OSError: the disk is full. Nothing of the line is left.
        """
        self._file.write(msgspec.json.encode({name: _tidy(value) for name, value in metrics.items()}) + b"\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """A TensorBoard event file under `directory`, one scalar a metric.

    Its own writer has a thread, whose errors nobody can catch; this one writes where it is called.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(WholeWrites(directory / name))
        self._begun = False

    def write(self, metrics: Mapping[str, float]) -> None:
        """One step, all metrics in one event.

        Raises:
            OSError: the disk is full. Nothing of the event is left.
        """
        if not self._begun:  # the format's first record; not at the start, where a full disk would have no step to name
            self._records.write(self._event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            self._begun = True
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in metrics.items() if k != "step"]
        event = self._event(wall_time=time.time(), step=int(metrics["step"]), summary=self._summary(value=values))
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._records.close()


class WholeWrites:
    """A file that is appended to: each piece is whole in it when `write` returns, or not there at all."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, piece: bytes) -> None:
        """Raises:
        OSError: the disk is full. Nothing of the piece is left.
        """
        before = os.fstat(self._file.fileno()).st_size
        if self._file.write(piece) != len(piece):  # what still had room
            os.ftruncate(self._file.fileno(), before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl`. A last line that a killed run left half-written is passed over.

    Raises:
        UserError: no such file, or a line in it that is not a step's metrics.
    """
    return [row for _, row in metrics_lines(path)]


def metrics_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The same, each with the line as it stands in the file, its end included."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return [(line + b"\n", _row(line, f"{path}, line {number}")) for number, line in enumerate(lines, start=1)]


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # bytes that are no text are a ValueError too
        raise UserError(f"{where}: not JSON") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a table of metrics")
    if type(row.get("step")) is not int:
        raise UserError(f'{where}: no step\'s metrics: "step" is not a whole number')
    for name, value in row.items():
        if value is not None and not isinstance(value, int | float):
            raise UserError(f"{where}: {name} is not a number")
    return row


def _tidy(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else value
