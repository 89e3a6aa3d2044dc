"""What signals do to `fleuve train`, from its first instruction to its last.

SIGINT, SIGTERM and SIGHUP end it; SIGUSR1 asks for a checkpoint. Before there is a run that can answer, ending is at
once and without a word, and the checkpoint is remembered. This is loaded before everything else, so it loads nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130
"""The exit code of a command that one of them ended."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """The handlers of this process. They are functions, which a program that is started from here does not inherit."""

    def __init__(self) -> None:
        self.save_asked = False
        """SIGUSR1 came before anybody could answer it."""
        self._end: Callable[[], object] | None = None
        self._save: Callable[[], object] | None = None

    def install(self) -> None:
        """From here on, for as long as the process lives. SIGHUP stays ignored where it is (`nohup`)."""
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_end)
        signal.signal(signal.SIGUSR1, self._on_save)

    def answer(self, end: Callable[[], object], save: Callable[[], object]) -> None:
        """Call these from here on: between any two instructions of the main thread, so they should do little."""
        self._end, self._save = end, save

    def unanswered(self) -> None:
        """Nobody answers any more: as in the beginning."""
        self._end = self._save = None

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        if self._end is None:
            os._exit(INTERRUPTED)
        self._end()

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save_asked = True
        if self._save is not None:
            self._save()


signals = Signals()
"""Those of this process."""
