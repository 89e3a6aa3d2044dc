"""What passes between a candidate and its examiner: plain data as JSON in frames, and references to all other objects.

A value arrives as an object of Python's own types, rebuilt by the receiver: none of the sender's classes, and so none
of its `__eq__`, comes along. Instances of subclasses arrive as the plain type they derive from.
"""

from __future__ import annotations

import builtins
import json
import socket
from collections.abc import Callable
from typing import Any

MAX_FRAME = 8 * 2**20
"""Bytes of one message."""
MAX_DEPTH = 60
"""Of nested containers."""
MUTABLE = (list, dict, set, bytearray)
_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
_SMALL = 2**62


class ClosedError(EOFError):
    """The other side has ended, or does not keep to the protocol."""


class Shared:
    """The mutable containers of one question and its answer, by number: both sides number them in the same order. So
    what a call changes in them, wherever they lie and however often, can be told to the other side."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def number(self, value: Any) -> int | None:
        """That of a container that is known; None if it is new."""
        return self._numbers.get(id(value))

    def add(self, value: Any) -> int:
        self._numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        return len(self.objects) - 1

    def forget(self, count: int) -> None:
        """All but the first `count`."""
        for value in self.objects[count:]:
            del self._numbers[id(value)]
        del self.objects[count:]


def encode(value: Any, refer: Callable[[Any], int] | None = None, shared: Shared | None = None, depth: int = 0) -> Any:
    """As JSON can hold it. `refer` numbers the objects that are no plain data, `shared` the mutable containers.

    Raises:
        ValueError: nested too deeply, or no plain data and `refer` is None.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -_SMALL < value < _SMALL else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, type):
        name = type.__getattribute__(value, "__name__")
        if getattr(builtins, name, None) is value:
            return {"type": name}
    if isinstance(value, MUTABLE):
        if shared is None:
            return content(value, refer, shared, depth)
        known = shared.number(value)
        if known is not None:
            return {"same": known}
        return {"new": [shared.add(value), content(value, refer, shared, depth)]}
    for kind in (tuple, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, refer, shared, depth + 1) for item in value]}
    if isinstance(value, _VIEWS):
        return content(list(value), refer, shared, depth)
    if refer is None:
        raise ValueError(f"an object of type {type(value).__name__} cannot be passed to the candidate")
    return {"ref": refer(value)}


def content(value: Any, refer: Callable[[Any], int] | None = None, shared: Shared | None = None, depth: int = 0) -> Any:
    """What a mutable container holds, encoded."""
    if isinstance(value, bytearray):
        return {"bytearray": value.hex()}
    if isinstance(value, dict):
        deeper = depth + 1
        pairs = [[encode(k, refer, shared, deeper), encode(v, refer, shared, deeper)] for k, v in value.items()]
        return {"dict": pairs}
    items = [encode(item, refer, shared, depth + 1) for item in value]
    return items if isinstance(value, list) else {"set": items}


def decode(data: Any, resolve: Callable[[int], Any], shared: Shared | None = None) -> Any:
    """The inverse of `encode`. `resolve` makes an object of a reference.

    Raises:
        ValueError, TypeError, AttributeError, LookupError: no such encoding.
    """
    if isinstance(data, list):
        return [decode(item, resolve, shared) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, body),) = data.items()
    match kind:
        case "int":
            return int(body, 16)
        case "complex":
            return complex(*body)
        case "bytes":
            return bytes.fromhex(body)
        case "bytearray":
            return bytearray.fromhex(body)
        case "dict":
            return {decode(k, resolve, shared): decode(v, resolve, shared) for k, v in body}
        case "range":
            return range(*body)
        case "tuple":
            return tuple(decode(item, resolve, shared) for item in body)
        case "set":
            return {decode(item, resolve, shared) for item in body}
        case "frozenset":
            return frozenset(decode(item, resolve, shared) for item in body)
        case "type":
            named = getattr(builtins, body)
            return named if isinstance(named, type) else None
        case "ref":
            return resolve(body)
        case "same" if shared is not None:
            return shared.objects[body]
        case "new" if shared is not None:
            number, inner = body
            empty: Any = (
                [] if isinstance(inner, list) else {"dict": {}, "set": set(), "bytearray": bytearray()}[min(inner)]
            )
            if shared.add(empty) != number:
                raise ValueError("numbered otherwise")
            refill(empty, decode(inner, resolve, shared))
            return empty
    raise ValueError(f"no such value: {kind!r}")


def refill(container: Any, left: Any) -> None:
    """Give a mutable container this content, unless it has it: it may be what a loop goes through.

    Raises:
        TypeError: `left` is of another kind.
    """
    if not any(isinstance(container, kind) and type(left) is kind for kind in MUTABLE):
        raise TypeError("it is no such container")
    if isinstance(container, dict):
        before, after = [*container.items()], [*left.items()]
        if not _alike([part for pair in before for part in pair], [part for pair in after for part in pair]):
            dict.clear(container)
            dict.update(container, left)
    elif isinstance(container, set):
        if container != left:
            set.clear(container)
            set.update(container, left)
    elif not _alike(container, left):
        container[:] = left


def _alike(one: Any, other: Any) -> bool:
    """Item by item: the same objects, or equal ones of the same type that cannot be changed."""
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and not isinstance(a, MUTABLE) and a == b)
        for a, b in zip(one, other, strict=True)
    )


def framed(message: Any) -> bytes:
    """What goes into one frame.

    Raises:
        ValueError: it is longer than `MAX_FRAME`.
    """
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME:
        raise ValueError(f"a value of {len(body)} bytes is too large to pass")
    return body


def write(connection: socket.socket, message: Any) -> None:
    """One frame.

    Raises:
        ValueError: longer than `MAX_FRAME`.
        ClosedError: the other side has ended.
    """
    body = framed(message)
    try:
        connection.sendall(len(body).to_bytes(4, "big") + body)
    except OSError:
        raise ClosedError("the other side has ended") from None


def read(connection: socket.socket) -> Any:
    """One frame.

    Raises:
        ClosedError: there is none, or none that can be read.
    """
    size = int.from_bytes(_exactly(connection, 4), "big")
    if size > MAX_FRAME:
        raise ClosedError(f"a frame of {size} bytes")
    try:
        return json.loads(_exactly(connection, size))
    except (ValueError, RecursionError):
        raise ClosedError("a frame that is not JSON") from None


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(min(65536, size - len(data)))
        except OSError:
            part = b""
        if not part:
            raise ClosedError("the other side has ended")
        data += part
    return bytes(data)
