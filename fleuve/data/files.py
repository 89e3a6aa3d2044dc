"""Rows of a JSONL or Parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fleuve.config.nearest import did_you_mean, nearest_path
from fleuve.data.rows import Row, parse_json_row
from fleuve.errors import UserError

_JSONL = (".jsonl", ".ndjson")


def read_file(path: Path) -> Iterator[Row]:
    """The rows in the file's order, read as they are asked for.

    Raises:
        UserError: no such file, a format that is not read here, a broken row, or no rows at all.
    """
    if not path.is_file():
        what = "a directory" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {what}{did_you_mean(nearest_path(path, (*_JSONL, '.parquet')))}")
    if path.suffix in _JSONL:
        rows = _read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        raise UserError(f"{path}: cannot read {path.suffix or 'files without suffix'}; data is .jsonl or .parquet")
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise UserError(f"{path}: the data set is empty")


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield parse_json_row(line, f"{path}:{number}")


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise UserError(f"{path}: cannot be read as Parquet: {' '.join(str(error).split())}") from None
    number = 0
    for batch in file.iter_batches():
        for fields in batch.to_pylist():
            number += 1
            yield Row(f"{path} row {number}", fields)
