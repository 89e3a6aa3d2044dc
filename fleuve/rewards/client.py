"""A reward service on another machine, as the run sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

import aiohttp
import msgspec

from fleuve.config.settings import RewardSettings
from fleuve.errors import UserError
from fleuve.rewards.tally import Tally
from fleuve.rewards.weighted import names
from fleuve.rewards.wire import MSGPACK, TOKEN_VARIABLE, Health, ScoreRequest, missing, one_line
from fleuve.types import Prompt, Verdict, decode, encode
from fleuve.wire.guard import bearer, find_token

CONNECT_SECONDS = 10.0
_PAUSES = (0.1, 0.5, 2.0, 5.0)
"""Seconds before another attempt: so long a service may be away, to be started again, without a verdict lost to it."""
_MARGIN = 30.0
"""Seconds that a reply may take beyond the wait and the check themselves."""
_UNAVAILABLE = (502, 503, 504)


class RemoteRewarder:
    """Implements `contracts.Rewarder` by a service at `settings.url`. A check that a lost connection took along is sent
    again, until `settings.queue_timeout` has passed; checks have no effects, so that one run twice does no harm."""

    def __init__(self, settings: RewardSettings, verifiers: Sequence[str]) -> None:
        assert settings.url is not None
        self._url = settings.url.rstrip("/")
        self._settings = settings
        self._verifiers = names(verifiers)
        self._session: aiohttp.ClientSession | None = None
        self._deadline = settings.deadline
        self._tally = Tally()
        self._waiting = 0

    async def __aenter__(self) -> RemoteRewarder:
        """Connects, and asks whether the service has the verifiers.

        Raises:
            UserError: it cannot be reached within `start_timeout`, wants another token, or lacks a verifier.
        """
        self._session = aiohttp.ClientSession(
            headers=bearer(find_token(TOKEN_VARIABLE)),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )
        try:
            await self._introduce()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def score(self, prompt: Prompt, text: str) -> Verdict:
        """One answer's verdict. A service that cannot be reached in time is a verdict without score."""
        text = text.encode(errors="replace").decode()
        request = ScoreRequest(id=prompt.id, verifier=prompt.verifier, text=text, answer=prompt.answer, row=prompt.row)
        try:
            body = encode(request)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return self._no_verdict("error", f"row {prompt.id} cannot be sent to a verifier: {error}")
        self._waiting += 1
        try:
            return await self._score(body, prompt)
        finally:
            self._waiting -= 1

    def metrics(self) -> dict[str, float]:
        """`reward_service/...`: what this run has had of the service, with its checks under way."""
        return {**self._tally.metrics(), "reward_service/queued": float(self._waiting)}

    async def _score(self, body: bytes, prompt: Prompt) -> Verdict:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.queue_timeout
        what = f"a check of row {prompt.id} by the reward service at {self._url}"
        attempt = 0
        while True:
            try:
                # The service bounds the wait and the check; this bounds the service.
                wait = max(0.0, until - loop.time()) + self._deadline + _MARGIN
                async with asyncio.timeout(wait):
                    reply = await self._ask(body)
            except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:  # a TimeoutError is an OSError
                why = str(error) or type(error).__name__
            else:
                self._count(reply)
                return reply
            pause = _PAUSES[min(attempt, len(_PAUSES) - 1)]
            attempt += 1
            if loop.time() + pause >= until:
                reason = (
                    f"{what} was not answered within {self._settings.queue_timeout:g} s ({attempt} attempts): {why}"
                )
                return self._no_verdict("unreachable", reason)
            self._tally.counts["replaced"] += 1
            await asyncio.sleep(pause)

    async def _ask(self, body: bytes) -> Verdict:
        """One attempt.

        Raises:
            aiohttp.ClientError, OSError: the service is not there, or not ready, for now.
            msgspec.DecodeError: it answers what is no verdict.
        """
        assert self._session is not None
        async with self._session.post(f"{self._url}/score", data=body, headers={"Content-Type": MSGPACK}) as response:
            content = await response.read()
            if response.status in _UNAVAILABLE:
                raise aiohttp.ClientError(f"HTTP {response.status}: {one_line(content)}")
            if response.status != 200:
                return Verdict(
                    score=None, reason=f"the reward service at {self._url}: {one_line(content)}", kind="error"
                )
        return decode(content, Verdict)

    def _no_verdict(self, kind: str, reason: str) -> Verdict:
        verdict = Verdict(score=None, reason=reason, kind=kind)
        self._count(verdict)
        return verdict

    def _count(self, verdict: Verdict) -> None:
        if verdict.score is None:
            self._tally.no_verdict(verdict.kind, verdict.seconds)
        else:
            self._tally.scored(verdict.seconds)
        if verdict.seconds:
            self._tally.queued(verdict.queue_seconds)

    async def _introduce(self) -> None:
        """Ask for its health until it answers."""
        assert self._session is not None
        why = "no answer"
        try:
            async with asyncio.timeout(self._settings.start_timeout):
                while True:
                    try:
                        async with self._session.get(f"{self._url}/health") as response:
                            if response.status == 200:
                                there = msgspec.json.decode(await response.read(), type=Health)
                                break
                            why = one_line(await response.read())
                            if response.status not in _UNAVAILABLE:
                                raise UserError(f"reward.url = {self._url}: {why}")
                    except (aiohttp.ClientError, OSError) as error:
                        why = str(error) or type(error).__name__
                    await asyncio.sleep(_PAUSES[1])
        except TimeoutError:
            within = f"within reward.start_timeout = {self._settings.start_timeout:g} s"
            raise UserError(f"reward.url = {self._url}: no reward service answered {within}: {why}") from None
        except msgspec.DecodeError:
            raise UserError(f"reward.url = {self._url}: what answers there is no reward service") from None
        self._deadline = there.deadline
        if lacking := missing(self._verifiers, there, self._url):
            raise UserError(lacking)
