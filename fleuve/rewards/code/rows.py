"""The tests in a data row.

- `tests` or `test_list` (MBPP): assertions, each a test; `test_setup_code` runs before them; `entry_point` says which
  names are the program's, where the tests do not show it (see `names`).
- `test` and `entry_point` (HumanEval): a source that defines `check(candidate)`; `prompt`: what the program completes.
- `cases`: `[{"input": ..., "output": ...}, ...]`, texts for stdin and stdout; with `fn_name`, arguments and results of
  that function, as JSON (see `calls`).
"""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from dataclasses import dataclass
from typing import Any

from fleuve.rewards.code.calls import PREFIX, calls
from fleuve.rewards.code.names import Names, assign
from fleuve.rewards.code.output import TOLERANCE

_CANDIDATE = "_candidate_under_test"


@dataclass(frozen=True)
class Functions:
    """Tests that call functions of the program. `names.remote` are the program's even if `setup` or Python defines
    them. `prefix` is executed before every program. `completes`: what the row's prompt begins to define."""

    tests: list[str]
    names: Names
    setup: str = ""
    prefix: str = ""
    completes: str = ""


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
            setup, each, remote = calls(_text(row, "fn_name"), cases, TOLERANCE)
            return Functions(each, Names(remote), setup, prefix=PREFIX)
        return Outputs([(_text(case, "input", ""), _text(case, "output")) for case in cases])
    said = _said(row)
    if said and "test" in row:
        return _completion(_text(row, "test"), said, _text(row, "prompt", ""))
    tests = row.get("tests", row.get("test_list"))
    if isinstance(tests, str):
        tests = [tests]
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError('the row has no tests: it needs "tests", "test" and "entry_point", or "cases"')
    setup = _text(row, "test_setup_code", "")
    return Functions(list(tests), assign(setup, tests, said), setup)


def _completion(test: str, said: list[str], prompt: str) -> Functions:
    """As in HumanEval. The function is handed to `check`, so a builtin of its name stays a builtin in the test."""
    name = said[0]
    source = f"{test}\ncheck({_CANDIDATE})\n"
    setup, prefix = _complete(prompt, name), ""
    if setup:  # The helpers that the tests use are those of the prompt, not what the program makes of them.
        prefix = _before(prompt, name)
    said = [_CANDIDATE, *(other for other in said if not hasattr(builtins, other))]
    names = assign(setup, [source], said)
    return Functions(
        [source], Names(names.remote | {_CANDIDATE: name}, names.modules, names.helpers), setup, prefix, name
    )


def _said(row: dict[str, Any]) -> list[str]:
    """The names that the row says are the program's."""
    said = row.get("entry_point", row.get("fn_name"))
    listed = said if isinstance(said, list) else [] if said is None else [said]
    for name in listed:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f'the row\'s "entry_point" is no name: {name!r}')
    return listed


def _text(row: dict[str, Any], field: str, default: str | None = None) -> str:
    value = row.get(field, default)
    if not isinstance(value, str):
        raise ValueError(f'the row\'s "{field}" must be a text, not {type(value).__name__}')
    return value


def _complete(prompt: str, name: str) -> str:
    """A prompt as a module of its own: what it defines before the function that is to be completed. Empty if it is
    prose."""
    source = prompt.rstrip() + "\n    pass\n"
    if _start(prompt, name) is None:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return source


def _before(prompt: str, name: str) -> str:
    """Imports and helpers: what stands in a prompt before the function that is to be completed."""
    start = _start(prompt, name)
    return prompt[: start.start()] if start else ""


def _start(prompt: str, name: str) -> re.Match[str] | None:
    return re.search(rf"^(?:async[ \t]+)?def[ \t]+{name}\b", prompt, re.MULTILINE)
