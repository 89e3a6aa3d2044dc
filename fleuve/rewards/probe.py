"""Does the reward service at `reward.url` answer, and has it the verifiers? One look, before anything starts."""

from __future__ import annotations

import http.client
from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec

from fleuve.errors import UserError
from fleuve.rewards.weighted import names
from fleuve.rewards.wire import TOKEN_VARIABLE, Health, missing, one_line

SECONDS = 2.0
"""For an answer: whoever waits for this look wants to go on."""
_LONGEST = 1 << 16
_NOT_READY = 503


def probe(url: str, verifiers: Iterable[str]) -> tuple[Health | None, str]:
    """The service's health, or None and why there is none now, which may change until it is needed.

    Raises:
        UserError: what will not change by waiting: it wants another token, lacks a verifier, or is something else.
    """
    place = urlsplit(url)
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    from fleuve.wire.guard import bearer, find_token  # brings aiohttp, which `fleuve check` has no other use for

    headers = bearer(find_token(TOKEN_VARIABLE))
    try:
        connection = kind(place.netloc, timeout=SECONDS)
        try:
            connection.request("GET", "/health", headers=headers)
            response = connection.getresponse()
            status, body = response.status, response.read(_LONGEST)
        finally:
            connection.close()
    except http.client.InvalidURL as error:
        raise UserError(f"reward.url = {url}: {error}") from None
    except (OSError, http.client.HTTPException) as error:
        return None, str(error) or type(error).__name__
    if status == _NOT_READY:
        return None, one_line(body)
    if status != http.client.OK:
        raise UserError(f"reward.url = {url}: {one_line(body) or f'HTTP {status}'}")
    try:
        there = msgspec.json.decode(body, type=Health)
    except msgspec.DecodeError:
        raise UserError(f"reward.url = {url}: what answers there is no reward service") from None
    if lacking := missing(names(verifiers), there, url):
        raise UserError(lacking)
    return there, ""
