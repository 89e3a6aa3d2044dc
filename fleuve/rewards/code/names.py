"""Whose are the names in a row's tests: the tests' own, Python's, or the program's?

A program must not answer for what a test compares with: `assert isclose(f(2), 1.5)` would pass whatever `f` is, if
`isclose` were the program's. So a row may say which names are the program's, and then no others are. If it does not,
its tests must show it: see `_shown`.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from fleuve.rewards.code.flow import Flow

HELPERS = frozenset({"isclose", "isnan", "isinf", "isfinite", "sqrt", "floor", "ceil", "fabs", "inf", "nan", "pi"})
"""What tests use of `math` without an import, beside the function under test."""

_STARS = frozenset(
    {"math", "cmath", "typing", "collections", "itertools", "functools", "heapq", "bisect", "string", "re", "random"}
    | {"operator", "fractions", "decimal", "datetime", "statistics", "copy"}
)


@dataclass(frozen=True)
class Names:
    """`remote`: what is called so in the tests → what the program calls it. `modules` are imported for the tests,
    `helpers` are those of `math`."""

    remote: dict[str, str]
    modules: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()


def assign(setup: str, tests: Sequence[str], said: Sequence[str]) -> Names:
    """`said`: the names that the row says are the program's, none if it says nothing.

    Raises:
        ValueError: the tests are not Python, or it cannot be told of a name whose it is.
    """
    before, *each = [_parsed(source) for source in (setup, *tests)]
    trees = [before, *each]
    free = free_names(trees)
    modules = {name for name in free if name in sys.stdlib_module_names and not _called(name, trees)} - set(said)
    free -= modules
    helpers = free & HELPERS - set(said)
    if not said and len(free) == 1:
        helpers = set()  # it is the function under test
    free -= helpers
    if said:
        remote = set(said)
        if other := sorted(free - remote):
            raise ValueError(
                f"the row's tests cannot be run: nothing defines {other[0]!r}. Import or define it in the tests, or "
                'add it to "entry_point" (a list) if it is the program\'s'
            )
    else:
        remote = free or builtins_under_test(each)
        if not remote:
            raise ValueError("the row's tests cannot be run: they use nothing that the program defines")
        _shown(before, each, remote)
    return Names({name: name for name in sorted(remote)}, tuple(sorted(modules)), tuple(sorted(helpers)))


def _parsed(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes in their texts are the tests' own affair
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the row's tests cannot be run: {error}") from None


def free_names(trees: Sequence[ast.Module]) -> set[str]:
    """Names that are used, and neither bound anywhere in these modules nor Python's own."""
    used: set[str] = set()
    bound: set[str] = set(dir(builtins)) | {"__name__"}
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.add(name)
                case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    bound.add(name)
                case ast.ImportFrom(module=str(module), names=[ast.alias(name="*")]) if module in _STARS:
                    bound.update(dir(importlib.import_module(module)))
                case ast.alias(name=name, asname=other):
                    bound.add(other or name.partition(".")[0])
    return used - bound


def builtins_under_test(trees: Sequence[ast.Module]) -> set[str]:
    """A function under test that has the name of a builtin: every test is an assertion whose left side calls it, and no
    other function under test is called in there. (Else `set` in `set(f(x)) == set(...)` would be the candidate's.)"""
    found: set[str] = set()
    for tree in trees:
        match tree.body:
            case [ast.Assert(test=ast.Compare(left=ast.Call(func=ast.Name(id=name)) as call, comparators=[expected]))]:
                called = {n.id for n in ast.walk(expected) if isinstance(n, ast.Name)}
                if not hasattr(builtins, name) or name in called or free_names([_module(call)]):
                    return set()
                found.add(name)
            case _:
                return set()
    return found if len(found) == 1 else set()


def _shown(setup: ast.Module, tests: Sequence[ast.Module], names: set[str]) -> None:
    """Whether the tests themselves show that these undefined names are all the program's to define.

    One is. Several are, if nothing that one has made is ever given to another or compared with what another has made,
    but for classes (names with a capital) whose objects are arguments of the function under test. Everything else may
    be a helper that the row forgot.

    Raises:
        ValueError: they do not show it.
    """
    if len(names) == 1:
        return
    functions = {name for name in names if not name.lstrip("_")[:1].isupper()}
    pair = next(filter(None, (Flow(setup, test, functions, names - functions).doubt() for test in tests)), None)
    if pair is not None:
        raise ValueError(
            f"the row's tests cannot be run: they use {pair[0]!r} together with {pair[1]!r}, and nothing defines "
            'either. If both are the program\'s, the row must say so: "entry_point": ["NAME", ...]. If one is a helper '
            "of the tests, define it there"
        )


def _called(name: str, trees: Sequence[ast.Module]) -> bool:
    """Whether it is used other than as a module, whose attributes are read."""
    modules = {id(node.value) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    uses = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name)
    return any(id(node) not in modules for node in uses)


def _module(expression: ast.expr) -> ast.Module:
    return ast.Module([ast.Expr(expression)], [])
