"""Cases that call one function, as LiveCodeBench's "functional" ones and LeetCode's: arguments and result are JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

PREFIX = "import bisect, collections, functools, heapq, itertools, math, re, string\nfrom typing import *\n"
"""What such problems let a program take for granted."""

# It runs where the tests do, out of the program's reach. `_solution` and `_function` are the program's: under these
# names, so that a function with the name of a builtin is never taken for the builtin, nor the builtin for it.
_SETUP = """
import json as _json, math as _math

def _call(arguments):
    try:
        function = getattr(_solution(), "NAME")
    except NameError:
        function = _function
    return function(*_json.loads(arguments))

def _same(given, expected):
    if isinstance(expected, list):
        return isinstance(given, (list, tuple)) and len(given) == len(expected) and all(map(_same, given, expected))
    if isinstance(expected, dict):
        if not isinstance(given, dict):
            return False
        given = {str(key): value for key, value in given.items()}
        return given.keys() == expected.keys() and all(_same(given[key], value) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(given, (int, float)) and not isinstance(given, bool):
        return _math.isclose(given, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return isinstance(given, bool) == isinstance(expected, bool) and given == expected
"""


def calls(name: str, cases: Sequence[dict[str, Any]], tolerance: float) -> tuple[str, list[str], dict[str, str]]:
    """Setup, tests, and the program's names in them, as assertions are run: a test for each case. A case's `input` is
    a text with one argument a line, each as JSON, or a list of the arguments; its `output` the result as JSON, or the
    result itself.

    Raises:
        ValueError: the name is none, or a case is not of this form.
    """
    if not name.isidentifier():
        raise ValueError(f'the row\'s "fn_name" is no name: {name!r}')
    tests = []
    for number, case in enumerate(cases, start=1):
        try:
            given, expected = case.get("input", ""), case["output"]
            if isinstance(given, str):
                given = [_read(line) for line in given.split("\n") if line.strip()]
            if isinstance(expected, str):
                expected = _read(expected)
            if not isinstance(given, list):
                raise ValueError("the input is no list of arguments")
            arguments, result = json.dumps(given), json.dumps(expected)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"case {number} of the row, which names a function, is not in JSON: {error}") from None
        tests.append(f"assert _same(_call({arguments!r}), _json.loads({result!r}))")
    setup = _SETUP.replace("NAME", name).replace("TOLERANCE", repr(tolerance))
    return setup, tests, {"_solution": "Solution", "_function": name}


def _read(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number in JSON")
