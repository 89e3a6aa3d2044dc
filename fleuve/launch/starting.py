"""A process that is lost while a run starts: nobody watches over it yet, so it is started once more here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fleuve.launch.process import LostAtStartError

T = TypeVar("T")

PAUSE = 1.0
"""Seconds before the second attempt: what killed the first (memory that ran out, say) may pass."""


async def twice(start: Callable[[], Awaitable[T]], note: Callable[[str], None]) -> T:
    """What `start` brings; it is tried once more if the first process is lost. One that ends by an error of its own
    would end so again.

    Raises:
        ChildError: it did not come up.
    """
    try:
        return await start()
    except LostAtStartError as error:
        note(f"{str(error).split('; ')[0]}; starting it once more")
    await asyncio.sleep(PAUSE)
    return await start()
