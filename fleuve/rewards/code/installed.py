"""The `code` verifier of one process: what `rewards.verifiers` calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from fleuve.rewards.code.options import CodeOptions
from fleuve.rewards.code.verify import CodeVerifier
from fleuve.rewards.sandbox.run import SandboxError

_options = CodeOptions()
_verifier: CodeVerifier | None = None
_promise: Callable[[float], None] | None = None


def configure(options: CodeOptions) -> None:
    """What the settings say; before anything else here."""
    global _options, _verifier
    if _verifier is not None:
        _verifier.close()
    _options, _verifier = options, None


def prepare() -> None:
    """Choose the walls, once for this process and all that it forks.

    Raises:
        UserError: those that the settings ask for cannot be had here.
    """
    global _verifier
    if _verifier is None:
        _verifier = CodeVerifier(_options, _promised)


def begin() -> None:
    """Start this process's own fork server, after which a check costs milliseconds. If it cannot be started, the first
    check tries again, and says so."""
    prepare()
    assert _verifier is not None
    with contextlib.suppress(SandboxError):
        _verifier.warm()


def tell(promise: Callable[[float], None]) -> None:
    """Who is to know when a check will take longer than its deadline, because its programs wait for a core."""
    global _promise
    _promise = promise


def _promised(seconds: float) -> None:
    if _promise is not None:
        _promise(seconds)


def verify(text: str, answer: str, row: dict[str, Any]) -> float:
    """One check. See `CodeVerifier`."""
    prepare()
    assert _verifier is not None
    return _verifier(text, row)
