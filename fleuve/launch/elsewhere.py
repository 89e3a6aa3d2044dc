"""A rollout worker that runs already, and is not this run's to start or to end: one of `rollout.urls`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fleuve.launch.process import ChildError
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
