"""Problems made up on the spot: `procedural:NAME[?key=value&...]` in the settings.

A generator is a frozen dataclass whose fields are its parameters and whose `row(rng)` makes one problem. The stream is
endless and depends on nothing but name, parameters and seed. `split=eval` and `split=train` (the default) never share
a prompt, whatever their seeds: a checksum of the prompt decides which of the two it belongs to.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Protocol

from fleuve.data.procedural.chain import Chain
from fleuve.data.procedural.numeral import Numeral
from fleuve.data.procedural.program import Program
from fleuve.errors import UserError

EVAL_SHARE = 8
"""One prompt in so many belongs to the eval split."""


class Generator(Protocol):
    """One kind of problem; its parameters are its dataclass fields."""

    def row(self, rng: random.Random) -> dict[str, Any]:
        """One problem: `prompt`, `answer` (what a verifier compares with), `completion` (a demonstration), and what
        else its verifier needs."""


GENERATORS: dict[str, type[Any]] = {"chain": Chain, "numeral": Numeral, "program": Program}


def rows(name: str, params: Mapping[str, str], seed: int) -> Iterator[dict[str, Any]]:
    """The endless stream of `name`'s problems.

    Raises:
        UserError: an unknown generator or parameter, or a value that does not parse or is out of bounds. Raised by
            this call, not by the first `next`.
    """
    values = dict(params)
    split = values.pop("split", "train")
    if split not in ("train", "eval"):
        raise UserError(f"procedural:{name}: split={split} is neither train nor eval")
    return _stream(build(name, values), split, random.Random(f"{name}/{seed}"))


def build(name: str, params: Mapping[str, str]) -> Generator:
    """The generator itself, its parameters parsed to their types.

    Raises:
        UserError: see `rows`.
    """
    if name not in GENERATORS:
        raise UserError(f"no procedural generator is called {name!r}; {_nearest(name, list(GENERATORS))}")
    kind = GENERATORS[name]
    parsers: dict[str, type[Any]] = {f.name: f.default.__class__ for f in fields(kind)}
    values: dict[str, Any] = {}
    for key, text in params.items():
        if key not in parsers:
            raise UserError(f"procedural:{name} has no parameter {key!r}; {_nearest(key, [*parsers, 'split'])}")
        try:
            values[key] = parsers[key](text)
        except ValueError:
            raise UserError(f"procedural:{name}: {key}={text} is not of type {parsers[key].__name__}") from None
    try:
        generator: Generator = kind(**values)
    except ValueError as error:
        raise UserError(f"procedural:{name}: {error}") from None
    return generator


def _stream(generator: Generator, split: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    while True:
        row = generator.row(rng)
        if (zlib.crc32(row["prompt"].encode()) % EVAL_SHARE == 0) == (split == "eval"):
            yield row


def _nearest(word: str, known: list[str]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(known))}"
