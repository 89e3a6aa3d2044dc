"""Ctrl-C: the first ends the run cleanly, the second at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from fleuve.contracts import Trainer
from fleuve.control.controller import Controller
from fleuve.launch.host import Process

STEP_GRACE = 3.0
"""Seconds after Ctrl-C for which the step in progress may go on before it is cut short."""


class Stop:
    """What SIGINT, SIGTERM and SIGHUP do at each stage of a run.

    While processes start: end at once. While the controller runs: end after the step in progress, which is cut short
    after `STEP_GRACE`. While the run is being saved: nothing more, it ends anyway. Asked a second time, at any stage:
    kill the processes and end at once, without a checkpoint.
    """

    def __init__(self, main: asyncio.Task[int]) -> None:
        self.asked = False
        self.at_once = False
        self._main = main
        self._controller: Controller | None = None
        self._trainer: Trainer | None = None
        self._children: Callable[[], Sequence[Process]] = list
        self._cut: asyncio.Task[None] | None = None
        self._ending = False
        self._save_asked = False

    def controls(self, controller: Controller, trainer: Trainer, children: Callable[[], Sequence[Process]]) -> None:
        """From here on there is something to end cleanly. `children()` are the processes of that moment."""
        self._controller, self._trainer, self._children = controller, trainer, children
        if self._save_asked:
            controller.save_soon()

    def ask(self) -> None:
        """The signal handler."""
        again, self.asked = self.asked, True
        if again or self._controller is None:
            self.at_once = True
            for child in self._children():
                child.kill()
            self._main.cancel()
        elif not self._ending:
            self._controller.stop()
            self._cut = asyncio.get_running_loop().create_task(self._cut_short())

    def save(self) -> None:
        """The signal handler of SIGUSR1: a checkpoint, as soon as there can be one."""
        self._save_asked = True
        if self._controller is not None and not self._ending:
            self._controller.save_soon()

    async def _cut_short(self) -> None:
        await asyncio.sleep(STEP_GRACE)
        assert self._trainer is not None
        await self._trainer.interrupt()

    async def run_has_ended(self) -> None:
        """No step is left to be cut short."""
        self._ending = True
        if self._cut is not None:
            self._cut.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._cut
            self._cut = None
