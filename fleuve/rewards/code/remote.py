"""The examiner's side of its talk with the candidate: questions, and objects that stand for the candidate's."""

from __future__ import annotations

import builtins
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from fleuve.rewards.code.values import ClosedError, Shared, decode, encode, read, refill, write

_NO_ANSWER = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, MemoryError)


class Candidate:
    """Asks the other side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.unpassable = ""
        """What the tests wanted to pass on that cannot be: a function, an instance of a class."""

    def ask(self, question: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        """The answer as plain data or `Remote`. Mutable containers in the arguments, wherever they lie, get the content
        that the call left in them.

        Raises:
            ClosedError: it has ended, or answers with what is no answer.
        """
        shared = Shared()
        try:
            write(self._connection, question | encoded(arguments, keywords, shared))
        except ValueError as error:
            self.unpassable = str(error)
            raise
        came = len(shared.objects)
        answer = read(self._connection)
        try:
            raised = _exception(answer["raised"], answer["message"]) if "raised" in answer else None
            value = None if raised else decode(answer["value"], self._remote, shared)
            left = [decode(inner, self._remote, shared) for inner in answer["left"]]
            for container, inner in zip(shared.objects[:came], left, strict=False):
                refill(container, inner)
        except _NO_ANSWER:
            raise ClosedError("it answers with what is no answer") from None
        if raised is not None:
            raise raised
        return value

    def _remote(self, number: int) -> Remote:
        return Remote(self.ask, int(number))


class Remote:
    """An object of the candidate's: it can be called, have its attributes and items read, and its content listed. It
    equals nothing but itself."""

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        self.__dict__.update(_ask_other=ask, _number=number)

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
        return self.__dict__["_ask_other"](question, *arguments, **keywords)


def encoded(arguments: tuple[Any, ...], keywords: dict[str, Any], shared: Shared) -> dict[str, Any]:
    """The arguments as part of a question.

    Raises:
        ValueError: one of them cannot be passed.
    """
    return {
        "arguments": [encode(value, _number, shared) for value in arguments],
        "keywords": {name: encode(value, _number, shared) for name, value in keywords.items()},
    }


def define(names: dict[str, Any], remote: dict[str, str], ask: Callable[..., Any]) -> None:
    """Put the candidate's functions into `names`, which has no others of these names then."""
    for name, theirs in remote.items():
        names.pop(name, None)
        with contextlib.suppress(NameError):
            names[name] = ask({"ask": "name", "name": theirs})
    # A builtin does not stand in for what the candidate does not define.
    names["__builtins__"] = {name: value for name, value in vars(builtins).items() if name not in remote}


def _number(value: Any) -> int:
    if isinstance(value, Remote):
        return int(value.__dict__["_number"])
    raise ValueError(f"an object of type {type(value).__name__} cannot be passed to the program under test")


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
