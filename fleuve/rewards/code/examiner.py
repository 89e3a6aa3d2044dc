"""In a sandbox of its own: runs a row's tests, and asks the candidate in the other sandbox for every call.

The tests and what they expect are here alone. Every comparison is made here, on data that this process has built: the
candidate gets arguments and gives results. So it can forge nothing but results, and for that it has to know them.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import math
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from fleuve.rewards.code.rehearsal import rehearse
from fleuve.rewards.code.remote import Candidate, define

CONNECTION, VERDICTS = 3, 4
"""Descriptors: the connection to the candidate, and where a `1` or `0` a test goes."""
BAD_TESTS = 3
"""Exit status when the row's tests cannot be run, whatever the program: what is wrong goes to stderr."""


def run(job: dict[str, Any]) -> int:
    """`setup` once, then each of `tests`. Names in `remote` are the candidate's even if the setup defines them."""
    try:
        setup, tests = ast.parse(job["setup"]), [ast.parse(test) for test in job["tests"]]
        setup_code = compile(setup, "setup.py", "exec")
        codes = [compile(tree, f"test_{number}.py", "exec") for number, tree in enumerate(tests)]
    except (SyntaxError, ValueError, RecursionError) as error:
        print(error, file=sys.stderr)
        return BAD_TESTS

    def names(ask: Callable[..., Any]) -> dict[str, Any]:
        given = {"__name__": "tests"} | {name: getattr(math, name) for name in job["helpers"]}
        for name in job["modules"]:  # the tests rely on an import of the program's: they get the real one
            with contextlib.suppress(ImportError):
                given[name] = importlib.import_module(name)
        define(given, job["remote"], ask)
        return given

    candidate = Candidate(socket.socket(fileno=CONNECTION))
    failed = False
    space: dict[str, Any] = {}
    try:
        space = names(candidate.ask)
        exec(setup_code, space)
        define(space, job["remote"], candidate.ask)
    except BaseException:
        failed = True
    for code in codes:
        passed = not failed and _passes(code, space)
        if candidate.unpassable:
            if reason := rehearse(setup, tests, names):
                print(reason, file=sys.stderr)
                return BAD_TESTS
            passed, candidate.unpassable = False, ""
        os.write(VERDICTS, b"1" if passed else b"0")
    return 0


def _passes(code: Any, names: dict[str, Any]) -> bool:
    try:
        exec(code, names)
    except BaseException:
        return False
    return True
