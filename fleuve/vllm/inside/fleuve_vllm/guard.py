"""Whoever does not show this server's token is turned away, at every door: vLLM's own key guards some paths, and not
those that pause it, change its weights or call its workers."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

TOKEN_VARIABLE = "FLEUVE_TOKEN"
OPEN = ("/health",)

_token: str | None = None


def take_token() -> None:
    """Take the token out of this process's environment, so that nothing that is started from here has it."""
    global _token
    _token = os.environ.pop(TOKEN_VARIABLE, None)


def has_token() -> bool:
    """Whether there is one to show."""
    return _token is not None


class Guard:
    """ASGI middleware, for `--middleware fleuve_vllm.guard.Guard`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("path") in OPEN or _knows(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = b'{"error": {"message": "this server wants its token, as the header Authorization: Bearer TOKEN"}}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _knows(scope: dict[str, Any]) -> bool:
    if _token is None:
        return True
    given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
    return hmac.compare_digest(given, b"Bearer " + _token.encode())
