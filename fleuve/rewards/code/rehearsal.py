"""Whose fault is it that a test has something to pass to the program that cannot be passed: the row's or the program's?

The tests are run once more, with objects in the program's place that do nothing. What cannot be passed then either is
the row's doing, and no program can be judged by it. What can is something that the program has given to the tests.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from fleuve.rewards.code.remote import Remote, encoded
from fleuve.rewards.code.values import Shared, framed

_ENOUGH = 10_000
_ANSWERS: dict[str, Any] = {"list": [], "len": 0, "bool": True, "set": None}


class EnoughError(BaseException):
    """The tests ask without end."""


class Stage:
    """Answers every question, and finds out what cannot be passed."""

    def __init__(self) -> None:
        self.unpassable = ""
        self._asked = 0

    def ask(self, question: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        self._asked += 1
        if self._asked > _ENOUGH:
            raise EnoughError
        try:
            framed(encoded(arguments, keywords, Shared()))
        except ValueError as error:
            self.unpassable = self.unpassable or str(error)
        return _ANSWERS.get(question["ask"], Remote(self.ask, self._asked))


def rehearse(setup: ast.Module, tests: list[ast.Module], names: Callable[[Callable[..., Any]], dict[str, Any]]) -> str:
    """What the tests themselves would pass that cannot be passed; "" if there is nothing. `names` makes the names in
    which the tests run, of whom they ask."""
    stage = Stage()
    space = names(stage.ask)
    for tree in (setup, *tests):
        try:
            patient = ast.fix_missing_locations(_Patient().visit(tree))
            exec(compile(patient, "tests.py", "exec"), space)
        except BaseException:
            continue
    return stage.unpassable


class _Patient(ast.NodeTransformer):
    """Statements that fail are passed over: here they would, since no answer is right."""

    def _tried(self, statement: ast.stmt) -> ast.stmt:
        ignored = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
        return ast.copy_location(ast.Try([statement], [ignored], [], []), statement)

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return self._tried(ast.copy_location(ast.Expr(node.test), node))

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        return self._tried(node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        return self._tried(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        return self._tried(node)
