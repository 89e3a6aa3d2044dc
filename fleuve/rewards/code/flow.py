"""Which undefined names of a test come together: in one expression, or by way of variables. Coarse, and on the safe
side: two names that share a statement or a variable come together, whatever the order."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

_COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Flow:
    """One test and the setup before it. `functions` and `classes`: the undefined names, without and with a capital."""

    def __init__(self, setup: ast.Module, test: ast.Module, functions: set[str], classes: set[str]) -> None:
        self._functions, self._classes = functions, classes
        self._pieces = [*_pieces(setup.body), *_pieces(test.body)]
        self._all = functions | classes | _bound(setup) | _bound(test)
        self._group: dict[str, str] = {}

    def doubt(self) -> tuple[str, str] | None:
        """Two names of which one may be a helper that the test lacks."""
        if not self._functions:
            used = sorted({name for piece in self._pieces for name in _names(piece) & self._classes})
            return (used[0], used[1]) if len(used) > 1 else None
        return self._two_functions() or self._class_as_helper()

    def _two_functions(self) -> tuple[str, str] | None:
        """Two functions in one group of names that share statements."""
        for piece in self._pieces:
            first, *others = [*(_names(piece, made_by=self._classes) & self._all), ""]
            for other in filter(None, others):
                self._group[self._root(other)] = self._root(first)
        leaders: dict[str, str] = {}
        for name in sorted({name for piece in self._pieces for name in _names(piece) & self._functions}):
            other = leaders.setdefault(self._root(name), name)
            if other != name:
                return other, name
        return None

    def _root(self, name: str) -> str:
        while (above := self._group.get(name, name)) != name:
            name = above
        return name

    def _class_as_helper(self) -> tuple[str, str] | None:
        """A class that is given what a function returns, or whose object is compared with it."""
        made = self._reached(self._classes)
        results = self._reached(self._functions)
        for piece in self._pieces:
            for call in _calls(piece, self._classes):
                if _names(call) & results:
                    return self._pair(_names(call))
            inside = {id(node) for call in _calls(piece, self._functions) for node in ast.walk(call)}
            outside = {n.id for n in ast.walk(piece) if isinstance(n, ast.Name) and id(n) not in inside} & made
            if isinstance(piece, ast.expr) and outside and _names(piece) & results:
                return self._pair(_names(piece))
        return None

    def _pair(self, names: set[str]) -> tuple[str, str]:
        """A class and a function, from among these if they have one."""
        return min(names & self._classes or self._classes), min(names & self._functions or self._functions)

    def _reached(self, names: set[str]) -> set[str]:
        """They, and the variables that are assigned from them, or have a method that is given them."""
        reached, before = set(names), -1
        while len(reached) != before:
            before = len(reached)
            for piece in self._pieces:
                for node in ast.walk(piece):
                    match node:
                        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                            targets: list[ast.AST] = list(getattr(node, "targets", None) or [node.target])  # type: ignore[union-attr]
                        case ast.AugAssign(value=value) | ast.NamedExpr(value=value):
                            targets = [node.target]
                        case ast.comprehension(target=target, iter=value) | ast.For(target=target, iter=value):
                            targets = [target]
                        case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                            targets = [target]
                        case ast.Call(func=ast.Attribute() as target):
                            value, targets = ast.Tuple(_arguments(node), ast.Load()), [target]
                        case ast.FunctionDef(name=name):
                            if _names(node) & reached:
                                reached.add(name)
                            continue
                        case _:
                            continue
                    if self._value(value) & reached:
                        reached |= {base for target in targets for base in _bases(target)}
        return reached

    def _value(self, value: ast.expr) -> set[str]:
        """The names from whose values it is made: not the arguments of a function under test."""
        inside = {id(n) for call in _calls(value, self._functions) for a in _arguments(call) for n in ast.walk(a)}
        return {n.id for n in ast.walk(value) if isinstance(n, ast.Name) and id(n) not in inside}


def _pieces(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Simple statements, the heads of compound ones, whole functions; each assertion as its parts joined by `and`."""
    for statement in body:
        if isinstance(statement, ast.Assert):
            yield from _conjuncts(statement.test)
        elif isinstance(statement, _COMPOUND):
            blocks = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(statement, "handlers", [])]
            for block in blocks:
                yield from _pieces(block)
            match statement:
                case ast.If(test=test) | ast.While(test=test):
                    yield test
                case ast.For() | ast.AsyncFor():
                    yield ast.Assign([statement.target], statement.iter)
                case ast.With(items=items) | ast.AsyncWith(items=items):
                    yield from items
                case ast.Try():
                    yield statement
        else:
            yield statement
            if isinstance(statement, _SCOPES):
                yield from _pieces(statement.body)
            elif isinstance(statement, ast.Return) and statement.value is not None:
                yield from _conjuncts(statement.value)


def _conjuncts(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for part in test.values:
            yield from _conjuncts(part)
    else:
        yield test


def _names(tree: ast.AST, made_by: Set[str] = frozenset()) -> set[str]:
    """Variables, functions, parameters; not the classes `made_by` where an object of them is made."""
    makers = {id(call.func) for call in _calls(tree, made_by)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in makers}
    return used | _bound(tree)


def _bound(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
    return found


def _bases(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _calls(tree: ast.AST, names: Set[str]) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
