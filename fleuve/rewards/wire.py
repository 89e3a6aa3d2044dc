"""What a reward service and its clients say to each other: msgpack over HTTP.

`POST /score` takes a `ScoreRequest` and returns a `types.Verdict`; `GET /health` returns `Health` as JSON, and
`GET /metrics` names and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

MSGPACK = "application/msgpack"
TOKEN_VARIABLE = "FLEUVE_REWARDS_TOKEN"
"""Environment variable of both sides: what the client has to know, if it is set where the service runs."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer to be scored. `id` is the row's, for messages."""

    id: str
    verifier: str
    text: str
    answer: str
    row: dict[str, Any]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A service that can score: with which verifiers, and the seconds that a check lasts at most."""

    verifiers: list[str]
    workers: int
    deadline: float


def missing(verifiers: Sequence[str], there: Health, url: str) -> str:
    """What the service at `url` lacks of these single verifiers, in words; "" if nothing."""
    lacking = [name for name in verifiers if not name.startswith("`") and name not in there.verifiers]
    if not lacking:
        return ""
    return (
        f"reward.url = {url}: the service has no verifier {lacking[0]!r}, only {', '.join(there.verifiers)}; "
        f"start it with --verifier {lacking[0]}"
    )


def one_line(content: bytes) -> str:
    """What a service said, for a message."""
    return " ".join(content.decode(errors="replace").split())[:500]
