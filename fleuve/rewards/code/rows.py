"""The tests in a data row.

- `tests` or `test_list` (MBPP): assertions, each a test; `test_setup_code` runs before them.
- `test` and `entry_point` (HumanEval): a source that defines `check(candidate)`; `prompt`: what the program completes.
- `cases`: `[{"input": ..., "output": ...}, ...]`, texts for stdin and stdout; with `fn_name`, arguments and results of
  that function, as JSON (see `calls`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fleuve.rewards.code.calls import PREFIX, calls
from fleuve.rewards.code.output import TOLERANCE


@dataclass(frozen=True)
class Functions:
    """Tests that call functions of the program. `prefix` stands before every program; names in `remote` are the
    program's even if `setup` defines them."""

    tests: list[str]
    setup: str = ""
    remote: tuple[str, ...] = ()
    prefix: str = ""


@dataclass(frozen=True)
class Outputs:
    """Inputs, and the outputs that a whole program should make of them."""

    cases: list[tuple[str, str]]


def tests_of(row: dict[str, Any]) -> Functions | Outputs:
    """What decides about a program for this row.

    Raises:
        ValueError: the row has no tests, or they are not of the form above.
    """
    if "cases" in row:
        cases = row["cases"]
        if not isinstance(cases, list) or not cases or not all(isinstance(case, dict) for case in cases):
            raise ValueError('the row\'s "cases" must be a list of {"input": ..., "output": ...}, and not empty')
        if row.get("fn_name") is not None:
            setup, each = calls(_text(row, "fn_name"), cases, TOLERANCE)
            return Functions(each, setup, prefix=PREFIX)
        return Outputs([(_text(case, "input", ""), _text(case, "output")) for case in cases])
    if "entry_point" in row and "test" in row:
        name, prompt = _text(row, "entry_point"), _text(row, "prompt", "")
        if not name.isidentifier():
            raise ValueError(f'the row\'s "entry_point" is no name: {name!r}')
        test = f"{_text(row, 'test')}\ncheck({name})\n"
        if re.search(rf"^def {name}\b", prompt, re.MULTILINE) is None:  # it is prose
            return Functions([test], remote=(name,))
        # The helpers that the tests use are those of the prompt, not what the program makes of them.
        return Functions([test], _complete(prompt), (name,), _before(prompt, name))
    tests = row.get("tests", row.get("test_list"))
    if isinstance(tests, str):
        tests = [tests]
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError('the row has no tests: it needs "tests", "test" and "entry_point", or "cases"')
    return Functions(list(tests), _text(row, "test_setup_code", ""))


def _text(row: dict[str, Any], field: str, default: str | None = None) -> str:
    value = row.get(field, default)
    if not isinstance(value, str):
        raise ValueError(f'the row\'s "{field}" must be a text, not {type(value).__name__}')
    return value


def _complete(prompt: str) -> str:
    """A prompt as a module of its own: what it defines before the function that is to be completed."""
    return prompt.rstrip() + "\n    pass\n"


def _before(prompt: str, name: str) -> str:
    """Imports and helpers: what stands in a prompt before the function that is to be completed."""
    start = re.search(rf"^def {name}\b", prompt, re.MULTILINE)
    return prompt[: start.start()] if start else ""
