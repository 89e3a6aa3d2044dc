"""A rollout worker that runs already, and is not this run's to start or to end: one of `rollout.urls`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.launch.process import ChildError
from fleuve.rollout.vllm_http import ForbiddenError
from fleuve.wire.guard import find_token

TOKEN_VARIABLE = "FLEUVE_ROLLOUT_TOKEN"
"""Environment variable: what the servers of `rollout.urls` want to be shown; or TOKEN_VARIABLE_FILE, a file with it."""


class Elsewhere:
    """Implements `host.Process` for a server at `url`, about whose process nothing is known."""

    def __init__(self, name: str, url: str, log_path: Path) -> None:
        """
        Raises:
            UserError: the token's file cannot be read.
        """
        self.name = name
        self.url = url
        self.log_path = log_path
        self.token = find_token(TOKEN_VARIABLE)
        self.pid = 0

    @property
    def alive(self) -> bool:
        return True

    @property
    def ending(self) -> str:
        return ""

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0

    async def died(self) -> ChildError:
        await self.wait()
        raise AssertionError("nobody is told of its end")

    async def stop(self, grace: float = 5.0) -> int:
        """It goes on."""
        return 0

    def kill(self) -> None:
        """It goes on."""

    def told(self, error: BaseException) -> RolloutError | None:
        """What a first look at it met, with the setting that is to be put right; None where it is none of ours."""
        if isinstance(error, WorkerLostError):
            return WorkerLostError(f"{error}; is a vLLM server running at {self.url}, which rollout.urls names?")
        if isinstance(error, ForbiddenError):
            what = f"is not the one in {TOKEN_VARIABLE}" if self.token else f"has to be in {TOKEN_VARIABLE}"
            return RolloutError(
                f"{self.name}: {self.url} wants its token (the server's FLEUVE_TOKEN), which {what} or the file that "
                f"{TOKEN_VARIABLE}_FILE names"
            )
        return None
