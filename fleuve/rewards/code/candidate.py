"""In the sandbox: defines what the model's program defines, and answers the examiner's questions about it.

Everything here is at the program's mercy, and it does not matter: an answer is only data, and whoever forges answers
has to know the right ones.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any

from fleuve.rewards.code.program import execute
from fleuve.rewards.code.values import ClosedError, Shared, content, decode, encode, read, write

CONNECTION = 3
"""The descriptor of the connection to the examiner."""


def run(job: dict[str, Any]) -> int:
    """Execute `job["source"]`, then answer until the examiner has no more questions."""
    sys.argv[:] = ["program.py"]
    status, names = execute(job["source"], "program", job.get("prefix", ""))
    if status:
        return status
    connection = socket.socket(fileno=CONNECTION)
    answer = Answers(names)
    while True:
        try:
            question = read(connection)
        except ClosedError:
            return 0
        write(connection, answer(question))


class Answers:
    """Looks names up, calls, reads and sets attributes; objects that are no plain data are kept here under a number."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._objects: list[Any] = []

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        """`{"value": ...}` or `{"raised": [names of the class and its bases], "message": ...}`; and `left`: the content
        of every mutable container that came with the question, after the call."""
        shared = Shared()
        arguments = [decode(value, self._resolve, shared) for value in question.get("arguments", [])]
        keywords = {name: decode(value, self._resolve, shared) for name, value in question.get("keywords", {}).items()}
        came = len(shared.objects)
        answer: dict[str, Any]
        try:
            value = self._ask(question, arguments, keywords)
            answer = {"value": encode(value, self._refer, shared)}
        except Exception as error:
            shared.forget(came)
            answer = {"raised": [kind.__name__ for kind in type(error).__mro__], "message": _message(error)}
        try:
            left = [content(container, self._refer, shared) for container in shared.objects[:came]]
        except Exception as error:  # it is nested too deeply now
            shared.forget(came)
            return {"raised": [kind.__name__ for kind in type(error).__mro__], "message": _message(error), "left": []}
        return answer | {"left": left}

    def _ask(self, question: dict[str, Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if question["ask"] == "name":
            if question["name"] not in self._names:
                raise NameError(f"name {question['name']!r} is not defined")
            return self._names[question["name"]]
        target = self._resolve(question["of"])
        operations: dict[str, Callable[..., Any]] = {
            "call": target,
            "get": lambda name: getattr(target, name),
            "set": lambda name, value: setattr(target, name, value),
            "item": lambda key: target[key],
            "list": lambda: list(target),
            "len": lambda: len(target),
            "bool": lambda: bool(target),
        }
        return operations[question["ask"]](*arguments, **keywords)

    def _refer(self, value: Any) -> int:
        for number, known in enumerate(self._objects[-1000:], start=max(0, len(self._objects) - 1000)):
            if known is value:
                return number
        self._objects.append(value)
        return len(self._objects) - 1

    def _resolve(self, number: int) -> Any:
        return self._objects[number]


def _message(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:
        return ""
