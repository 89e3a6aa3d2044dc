"""The event loop's lag: how long it was kept from its work by something that blocked it."""

from __future__ import annotations

import asyncio

from fleuve.contracts import Observer

LAG = "controller/loop_lag"


async def watch_lag(observer: Observer, every: float = 0.5, note_above: float = 1.0) -> None:
    """Report the loop's lag in seconds, every `every` seconds; one above `note_above` gets a line of its own.

    Runs until cancelled.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + every
        await asyncio.sleep(every)
        now = loop.time()
        lag = max(0.0, now - due)
        observer.count(LAG, lag, now)
        if lag > note_above:
            observer.note(f"the controller's event loop was blocked for {lag:.1f} s: user code must not run in it")
