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
_SMALL = 2**62


class ClosedError(EOFError):
    """The other side has ended, or does not keep to the protocol."""


def encode(value: Any, refer: Callable[[Any], int] | None = None, depth: int = 0) -> Any:
    """As JSON can hold it. `refer` numbers the objects that are no plain data.

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
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: value.hex()}
    if isinstance(value, dict):
        pairs = [[encode(k, refer, depth + 1), encode(v, refer, depth + 1)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, type):
        name = type.__getattribute__(value, "__name__")
        if getattr(builtins, name, None) is value:
            return {"type": name}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items = [encode(item, refer, depth + 1) for item in value]
            return items if kind is list else {kind.__name__: items}
    if refer is None:
        raise ValueError(f"an object of type {type(value).__name__} cannot be passed to the candidate")
    return {"ref": refer(value)}


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """The inverse of `encode`. `resolve` makes an object of a reference.

    Raises:
        ValueError, TypeError, AttributeError: no such encoding.
    """
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    match kind:
        case "int":
            return int(content, 16)
        case "complex":
            return complex(*content)
        case "bytes":
            return bytes.fromhex(content)
        case "bytearray":
            return bytearray.fromhex(content)
        case "dict":
            return {decode(k, resolve): decode(v, resolve) for k, v in content}
        case "range":
            return range(*content)
        case "tuple":
            return tuple(decode(item, resolve) for item in content)
        case "set":
            return {decode(item, resolve) for item in content}
        case "frozenset":
            return frozenset(decode(item, resolve) for item in content)
        case "type":
            named = getattr(builtins, content)
            return named if isinstance(named, type) else None
        case "ref":
            return resolve(content)
    raise ValueError(f"no such value: {kind!r}")


def write(connection: socket.socket, message: Any) -> None:
    """One frame.

    Raises:
        ValueError: longer than `MAX_FRAME`.
        ClosedError: the other side has ended.
    """
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME:
        raise ValueError(f"a value of {len(body)} bytes is too large to pass")
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
