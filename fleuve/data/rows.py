"""One row of a data set: where it stands, its fields, and the errors that name both."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fleuve.config.nearest import did_you_mean, nearest
from fleuve.errors import UserError


class Row(NamedTuple):
    """`where` is `file:line` (or what comes closest to it), `fields` the row's object."""

    where: str
    fields: dict[str, Any]


def require_fields(row: Row, text_fields: Sequence[str], value_fields: Sequence[str] = ()) -> Row:
    """The row itself, if every one of `text_fields` is a non-empty text and of `value_fields` a text or number.

    Raises:
        UserError: a field is missing (names the nearest there is), empty, NaN or infinite, or of another type.
    """
    for field in (*text_fields, *value_fields):
        if field not in row.fields:
            there = ", ".join(f'"{name}"' for name in row.fields) or "no fields at all"
            match = nearest(field, row.fields)
            hint = did_you_mean(f'"{match}"' if match else None)
            raise UserError(f'{row.where}: no field "{field}"; it has {there}{hint}')
        value = row.fields[field]
        if field in text_fields and not isinstance(value, str):
            raise UserError(f'{row.where}: field "{field}" is {_kind(value)}, not a text')
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise UserError(f'{row.where}: field "{field}" is {_kind(value)}, not a text or number')
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f'{row.where}: field "{field}" is {value}, not a text or a finite number')
        if isinstance(value, str) and not value.strip():
            raise UserError(f'{row.where}: field "{field}" is empty')
    return row


def as_text(value: str | int | float) -> str:
    """A reference answer as text: a whole number in floating point loses its `.0`."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def parse_json_row(line: bytes, where: str) -> Row:
    """One line of a JSONL file.

    Raises:
        UserError: not UTF-8, not JSON, not an object, or one that holds half a character (a lone surrogate).
    """
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise UserError(f"{where}: not valid JSON (nested too deeply)") from None
    if not isinstance(fields, dict):
        raise UserError(f"{where}: a row is a JSON object, this is {_kind(fields)}")
    if b"\\ud" in line.lower():
        _refuse_surrogates(fields, where)
    return Row(where, fields)


def _refuse_surrogates(fields: dict[str, Any], where: str) -> None:
    """Half a UTF-16 pair, as in `"\\ud800"`: JSON's escapes can say it, and no tokenizer or file can take it."""
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            shown = name.encode(errors="backslashreplace").decode()
            raise UserError(
                f'{where}: field "{shown}" holds {half}, one half of a character, which is no text'
            ) from None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
