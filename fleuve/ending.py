"""How a serving process ends: promptly, with the exit code and the words that fit what ended it."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fleuve.errors import UserError

INTERRUPTED = 130  # the exit code of a shell's command that Ctrl-C ended


def leave(code: int) -> NoReturn:
    """End this process now, without the interpreter's own finalisation.

    That would wait for every thread of every pool (one may be in the middle of reading gigabytes), takes long where
    large libraries are loaded, and can crash while torch's threads still run. Clean up before.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def leave_after(work: Callable[[], None]) -> NoReturn:
    """Do `work`, then leave: with 0; with 2 and one line for a UserError; with 1 and a traceback for anything else.

    Ctrl-C ends it with 130 and no words.
    """
    try:
        work()
    except Exception as error:
        leave_with(error)
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    leave(0)


def leave_with(error: Exception) -> NoReturn:
    """Leave as `leave_after` does when its work raises `error`; from any thread."""
    leave(_tell(error))


def leave_after_running(main: Coroutine[Any, Any, None]) -> NoReturn:
    """As `leave_after`, for a coroutine. Leaves from within the event loop: its end would wait for its threads."""

    async def whole() -> None:
        try:
            await main
        except Exception as error:
            leave(_tell(error))
        except asyncio.CancelledError:  # how `asyncio.run` passes a Ctrl-C on that `main` does not answer itself
            leave(INTERRUPTED)
        leave(0)

    asyncio.run(whole())
    raise AssertionError("unreachable")


def _tell(error: Exception) -> int:
    """Says on standard error what went wrong; returns the exit code."""
    if not isinstance(error, UserError):
        traceback.print_exception(error)
        return 1
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2
