"""In a sandbox of its own: runs a row's tests, and asks the candidate in the other sandbox for every call.

The tests and what they expect are here alone. Every comparison is made here, on data that this process has built: the
candidate gets arguments and gives results. So it can forge nothing but results, and for that it has to know them.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from fleuve.rewards.code.values import ClosedError, decode, encode, read, write

CONNECTION, VERDICTS = 3, 4
"""Descriptors: the connection to the candidate, and where a `1` or `0` a test goes."""
BAD_TESTS = 3
"""Exit status when the row's tests cannot be run, whatever the program: what is wrong goes to stderr."""


def run(job: dict[str, Any]) -> int:
    """`setup` once, then each of `tests`. Names in `remote` are the candidate's even if the setup defines them; so are
    all that are defined nowhere else."""
    candidate = Candidate(socket.socket(fileno=CONNECTION))
    setup, tests, remote = job["setup"], job["tests"], job["remote"]
    try:
        trees = [ast.parse(test) for test in tests]
        setup_tree = ast.parse(setup)
        names: dict[str, Any] = {"__name__": "tests"}
        setup_code = compile(setup_tree, "setup.py", "exec")
        codes = [compile(tree, f"test_{number}.py", "exec") for number, tree in enumerate(trees)]
    except (SyntaxError, ValueError, RecursionError) as error:
        print(error, file=sys.stderr)
        return BAD_TESTS
    try:
        for name in free_names([setup_tree, *trees]) | builtins_under_test(trees):
            if name in sys.stdlib_module_names:  # the tests rely on an import of the program's: they get the real one
                names[name] = importlib.import_module(name)
            else:
                candidate.define(name, names)
        exec(setup_code, names)
        for name in remote:
            names.pop(name, None)
            candidate.define(name, names)
    except BaseException:
        codes = [compile("raise RuntimeError", "setup.py", "exec")] * len(codes)
    for code in codes:
        passed = _passes(code, names)
        if candidate.unpassable:
            print(candidate.unpassable, file=sys.stderr)
            return BAD_TESTS
        os.write(VERDICTS, b"1" if passed else b"0")
    return 0


def _passes(code: Any, names: dict[str, Any]) -> bool:
    try:
        exec(code, names)
    except BaseException:
        return False
    return True


def free_names(trees: list[ast.Module]) -> set[str]:
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
                case ast.alias(name=name, asname=other):
                    bound.add(other or name.partition(".")[0])
    return used - bound


def builtins_under_test(trees: list[ast.Module]) -> set[str]:
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


def _module(expression: ast.expr) -> ast.Module:
    return ast.Module([ast.Expr(expression)], [])


class Candidate:
    """Asks the other side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.unpassable = ""
        """What the tests wanted to pass on that is no data: a function, an instance of a class."""

    def define(self, name: str, names: dict[str, Any]) -> None:
        """Put the candidate's `name` into `names`, if it has one."""
        with contextlib.suppress(NameError):
            names[name] = self.ask({"ask": "name", "name": name})

    def ask(self, question: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        """The answer as plain data or `Remote`. Mutable arguments get the content that the call left in them.

        Raises:
            ClosedError: it has ended, or answers with what is no answer.
        """
        write(
            self._connection,
            question
            | {
                "arguments": [encode(value, self._number) for value in arguments],
                "keywords": {name: encode(value, self._number) for name, value in keywords.items()},
            },
        )
        answer = read(self._connection)
        try:
            if "raised" in answer:
                raised: Exception | None = _exception(answer["raised"], answer["message"])
            else:
                raised = None
                value = decode(answer["value"], self._remote)
                after = [decode(argument, self._remote) for argument in answer["arguments"]]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError):
            raise ClosedError("it answers with what is no answer") from None
        if raised is not None:
            raise raised
        for argument, left in zip(arguments, after, strict=False):
            _refill(argument, left)
        return value

    def _remote(self, number: int) -> Remote:
        return Remote(self, number)

    def _number(self, value: Any) -> int:
        if isinstance(value, Remote):
            return int(value.__dict__["_number"])
        self.unpassable = f"an object of type {type(value).__name__} cannot be passed to the program under test"
        raise ValueError(self.unpassable)


class Remote:
    """An object of the candidate's: it can be called, have its attributes and items read, and its content listed. It
    equals nothing but itself."""

    def __init__(self, candidate: Candidate, number: int) -> None:
        self.__dict__.update(_candidate=candidate, _number=number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list"))

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return self._ask("bool") is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other.__dict__["_number"] == self.__dict__["_number"]

    def __hash__(self) -> int:
        return hash(self.__dict__["_number"])

    def _ask(self, what: str, *arguments: Any, **keywords: Any) -> Any:
        question = {"ask": what, "of": self.__dict__["_number"]}
        return self.__dict__["_candidate"].ask(question, *arguments, **keywords)


def _exception(names: list[str], message: str) -> Exception:
    """The first of these classes that Python has itself; no exception that would end more than a test."""
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(str(message))
            except TypeError:  # it wants other arguments
                continue
    return RuntimeError(str(message))


def _refill(argument: Any, left: Any) -> None:
    if type(argument) is not type(left) or argument == left:
        return
    if isinstance(argument, list | bytearray):
        argument[:] = left
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(left)
