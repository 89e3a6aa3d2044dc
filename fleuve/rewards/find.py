"""Is a verifier there? Looks for its module and reads its source, and imports nothing of the user's."""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from fleuve.errors import UserError
from fleuve.rewards.verifiers import BUILT_IN, check_name
from fleuve.rewards.weighted import terms


def check_verifier(verifier: str, directory: str | None = None, place: str = "data.verifier") -> None:
    """Look for every `module:function` in a weighted sum where a verifier process will: the current directory,
    `directory` (`reward.path`), and Python's own path. `place` is what named it.

    Raises:
        UserError: the name is none, there is no such module, its source cannot be read as Python, or it defines no such
            name at its top level.
    """
    for term in terms(verifier):
        _check(term.name, directory, place)


def _check(name: str, directory: str | None, named_by: str) -> None:
    check_name(name)
    if name in BUILT_IN or ":" not in name or name.startswith("`"):
        return
    module, _, function = name.partition(":")
    place = f"{named_by} = {name}"
    folders = [os.getcwd(), *([os.path.abspath(directory)] if directory else [])]
    spec = _find(module, [*folders, *sys.path])
    if spec is None:
        files = [path.stem for folder in folders for path in Path(folder).glob("*.py")]
        where = "the current directory" if len(set(folders)) == 1 else f"the current directory and {directory}"
        raise UserError(f"{place}: no module {module!r} in {where}, nor installed{_hint(module, files)}")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # compiled, built in, or a folder: only importing it would tell
    names = _names(Path(spec.origin), place)
    if names is not None and function not in names:
        raise UserError(f"{place}: {_shown(spec.origin)} has no function {function!r}{_hint(function, names)}")


def _find(module: str, path: Sequence[str]) -> ModuleSpec | None:
    """`importlib.util.find_spec`, which would import the packages that a dotted name lies in."""
    first, *rest = module.split(".")
    spec = _find_top(first, path)
    for part in rest:
        if spec is None:
            return None
        # By its last part alone: a dotted name makes the finder ask for packages that are not imported here.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    return spec


def _find_top(name: str, path: Sequence[str]) -> ModuleSpec | None:
    for finder in sys.meta_path:
        # The others, for what is built in or installed in place, know without a path.
        find = getattr(finder, "find_spec", None)
        if find is not None and (spec := find(name, path if finder is PathFinder else None)) is not None:
            return spec  # type: ignore[no-any-return]
    return None


def _names(path: Path, place: str) -> set[str] | None:
    """What a module defines at its top level; None if that cannot be told from its source."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise UserError(f"{place}: {_shown(path)}:{error.lineno}: not valid Python: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{place}: {_shown(path)}: cannot be read as Python: {error}") from None
    names: set[str] = set()
    for node in _top_level(tree.body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(id="globals" | "setattr" | "exec"):
                return None
    return None if names & {"*", "__getattr__"} else names


def _top_level(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """These nodes and all in them, but nothing inside functions and classes."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _top_level(ast.iter_child_nodes(node))


def _hint(word: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, sorted(set(names)), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _shown(path: str | Path) -> str:
    """Relative to the current directory where it is below that."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
