"""From a data specification to rows and prompts: `path.jsonl`, `path.parquet`, `procedural:NAME?key=value&...`."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from fleuve.config.settings import DataSettings, SftSettings
from fleuve.data.files import read_file
from fleuve.data.procedural import rows as procedural_rows
from fleuve.data.render import make_demonstration, make_prompt, row_verifier
from fleuve.data.rows import Row, require_fields
from fleuve.data.source import FilePasses, GeneratedPasses, Passes, RowSource
from fleuve.data.verified import check_verified
from fleuve.errors import UserError
from fleuve.types import Prompt

PROCEDURAL = "procedural:"
PASS_ROWS = 1024
"""Rows in one pass over a procedural source, which has no end of its own."""

Split = Literal["train", "eval"]


def read_rows(
    spec: str, data: DataSettings, completion_field: str | None = None, split: Split = "train"
) -> Iterator[Row]:
    """Every row of a file, or the endless rows of a generator; their fields are there and of the right type.

    A row needs a prompt and what its verifier compares with, or with `completion_field` a prompt and that.

    Raises:
        UserError: anything that is wrong with specification, file or row; `file:line` where there is one.
    """
    rows = _generate(spec, split, "rows") if spec.startswith(PROCEDURAL) else read_file(Path(spec))
    return _checked(rows, data, completion_field)


def open_source(spec: str, data: DataSettings, tokenizer: Any, seed: int, split: Split = "train") -> RowSource:
    """The endless stream of prompts for training.

    Raises:
        UserError: see `read_rows`; all rows of a file are read and checked here, once.
    """
    passes = _passes(spec, data, None, seed, split)
    verifiers = tuple(dict.fromkeys(row_verifier(row, data) for row in passes.rows(0)))
    return RowSource(passes, lambda id, row: make_prompt(id, row, data, tokenizer), verifiers)


def load_prompts(spec: str, data: DataSettings, tokenizer: Any, limit: int | None, seed: int = 0) -> list[Prompt]:
    """Prompts for an evaluation: the same ones whenever it is called with the same arguments.

    Of a file at most `limit` rows, drawn evenly, in the file's order (None: all). Of a generator `limit` different
    problems that its training split never holds.

    Raises:
        UserError: see `read_rows`; a generator without `limit`, or with fewer different problems than that.
    """
    if spec.startswith(PROCEDURAL):
        if limit is None:
            raise UserError(f"{spec} has no end: say how many problems to evaluate on (--limit)")
        rows = _different(spec, data, limit, seed)
    else:
        rows = list(read_rows(spec, data))
        if limit is not None and limit < len(rows):
            rows = [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), limit))]
    return [make_prompt(f"eval/{number}", row, data, tokenizer) for number, row in enumerate(rows)]


def open_demonstrations(settings: SftSettings, tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of prompts and completions for supervised training, without end, each pass in a new order.

    Raises:
        UserError: see `read_rows`.
    """
    data, field = settings.data, settings.completion_field
    passes = _passes(data.train, data, field, settings.seed, "train")
    for number in itertools.count():
        rows = passes.rows(number)
        for index in passes.order(number):
            yield make_demonstration(rows[index], data, field, tokenizer)


def parse_procedural(spec: str) -> tuple[str, dict[str, str]]:
    """`procedural:chain?a=1&b=2` to `("chain", {"a": "1", "b": "2"})`.

    Raises:
        UserError: a parameter that is not `key=value`.
    """
    name, _, query = spec.removeprefix(PROCEDURAL).partition("?")
    params: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not (key and equals):
            raise UserError(f"{spec}: {part!r} is not key=value")
        params[key] = value
    return name, params


def _passes(spec: str, data: DataSettings, completion_field: str | None, seed: int, split: Split) -> Passes:
    if not spec.startswith(PROCEDURAL):
        rows = list(read_rows(spec, data, completion_field))
        digest = hashlib.blake2b(digest_size=8)
        for row in rows:
            digest.update(repr(row.fields).encode(errors="replace"))
        return FilePasses(rows, digest.hexdigest(), seed, data.shuffle)

    def generate(number: int) -> Sequence[Row]:
        rows = itertools.islice(_generate(spec, split, f"{seed}/{number}"), PASS_ROWS)
        return list(_checked(rows, data, completion_field))

    generate(0)  # an error in the specification comes now
    return GeneratedPasses(generate, f"{spec}/{split}/{seed}")


def _checked(rows: Iterable[Row], data: DataSettings, completion_field: str | None) -> Iterator[Row]:
    if completion_field is not None:
        return (require_fields(row, [data.prompt_field, completion_field]) for row in rows)
    return (check_verified(require_fields(row, [data.prompt_field]), data) for row in rows)


def _generate(spec: str, split: Split, seed: str) -> Iterator[Row]:
    name, params = parse_procedural(spec)
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=7).digest(), "big")
    stream = procedural_rows(name, {"split": split, **params}, number)
    return (Row(f"{spec} row {i}", dict(fields)) for i, fields in enumerate(stream, start=1))


def _different(spec: str, data: DataSettings, count: int, seed: int) -> list[Row]:
    """The first `count` different problems of a generator's eval split."""
    found: dict[str, Row] = {}
    stream = _checked(_generate(spec, "eval", f"eval/{seed}"), data, None)
    for row in itertools.islice(stream, 100 * count + 1000):
        if len(found) == count:
            break
        found.setdefault(row.fields[data.prompt_field], row)
    if len(found) < count:
        raise UserError(f"{spec}: it has only about {len(found)} different problems to evaluate on, not {count}")
    return list(found.values())
