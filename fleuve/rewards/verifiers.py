"""Verifiers by name: `math`, `exact`, `code`, or your own `module:function`.

A verifier is `f(text: str, answer: str, row: dict) -> float`: the model's answer, the reference, the whole data row. It
may be `async`. It runs in a process of its own (`rewards.pool`): it may block, and it may crash. A regular expression
in backquotes is a verifier too, of an answer's form; `rewards.weighted` has sums of several.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import inspect
import math
import numbers
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from fleuve.errors import UserError
from fleuve.rewards.code import installed
from fleuve.rewards.math import verify_math, warm
from fleuve.rewards.weighted import terms

Verifier = Callable[[str, str, dict[str, Any]], Any]


def _math(text: str, answer: str, row: dict[str, Any]) -> float:
    choices = row.get("choices")  # of a multiple choice: letter and text are then the same answer
    return verify_math(text, answer, [str(c) for c in choices] if isinstance(choices, list | tuple) else ())


def _exact(text: str, answer: str, row: dict[str, Any]) -> float:
    return float(text.strip() == answer.strip())


BUILT_IN: dict[str, Verifier] = {"math": _math, "exact": _exact, "code": installed.verify}


def check_name(name: str) -> None:
    """Whether `name` can be a verifier, without importing anything of the user's.

    Raises:
        UserError: it is neither built in, nor of the form `module:function`, nor a regular expression in backquotes.
    """
    if name.startswith("`"):
        _pattern(name)
        return
    module, colon, function = name.partition(":")
    if name in BUILT_IN or (colon and _dotted(module) and function.isidentifier()):
        return
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "there are 'math', 'exact', 'code' and your own 'module:function'"
    raise UserError(f"data.verifier: no verifier {name!r}; {hint}")


def load(name: str) -> Verifier:
    """The verifier of that name; imports the user's module.

    Raises:
        UserError: the name is unknown, the module cannot be imported, or it has no such function.
    """
    check_name(name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith("`"):
        return functools.partial(_has_form, _pattern(name))
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(f"verifier {name!r}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        callables = [n for n, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(function_name, callables, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"verifier {name!r}: module {module_name!r} has no function {function_name!r}{hint}")
    return function  # type: ignore[no-any-return]


def prepare(name: str) -> None:
    """Load a verifier and what it imports at first use, so that no check's deadline pays for it."""
    load(name)
    if name == "math":
        warm()
    if name == "code":
        installed.prepare()


def begin(name: str) -> None:
    """What each process that checks needs of its own, after `prepare`."""
    if name == "code":
        installed.begin()


def run(verifier: str, text: str, answer: str, row: dict[str, Any]) -> tuple[float | None, str]:
    """One check, by a verifier or a weighted sum of them: `(score, "")`, or `(None, reason)` if one raised or returned
    what is no finite number."""
    total = 0.0
    try:
        parts = terms(verifier)
    except UserError as error:
        return None, str(error)
    for weight, name in parts:
        score, reason = _run_one(name, text, answer, row)
        if score is None:
            return None, reason
        total += weight * score
    return (total, "") if math.isfinite(total) else (None, f"{verifier!r} adds up to {total}")


def _run_one(name: str, text: str, answer: str, row: dict[str, Any]) -> tuple[float | None, str]:
    try:
        result = load(name)(text, answer, row)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        score, kind = _number(result), type(result).__name__
    except BaseException as error:  # SystemExit too: the reward function's failure, not the worker's
        return None, f"verifier {name!r} raised {_said(error)}"
    if score is None:
        return None, f"verifier {name!r} returned {kind}, not a number"
    if not math.isfinite(score):
        return None, f"verifier {name!r} returned {score}"
    return score, ""


def _said(error: BaseException) -> str:
    """Its class, and its message in one line. The message is user code's too."""
    kind = type(error).__name__
    try:
        return f"{kind}: {' '.join(str(error).split())[:500]}"
    except BaseException:
        return f"{kind}, whose message cannot be had"


def _number(result: Any) -> float | None:
    """What a verifier returned as a float; None if it is no real number. Arrays' and tensors' scalars, booleans among
    them, are known by their `item()`."""
    if not isinstance(result, numbers.Real | Decimal):
        try:
            result = result.item()
        except Exception:  # there is none, or it holds several numbers
            return None
    if not isinstance(result, numbers.Real | Decimal):
        return None
    try:
        return float(result)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if result == abs(result) else -math.inf
    except ValueError:  # a signalling NaN
        return math.nan


@functools.lru_cache(maxsize=64)
def _pattern(name: str) -> re.Pattern[str]:
    try:
        return re.compile(name.strip("`"), re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"data.verifier: {name} is no regular expression: {error}") from None


def _has_form(pattern: re.Pattern[str], text: str, answer: str, row: dict[str, Any]) -> float:
    return float(pattern.fullmatch(text.strip()) is not None)


def _dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))
