"""Which policy version each decode step of an engine sampled with.

All running sequences take part in every step, so the versions of an answer are a slice of the engine's history: an
array that all its answers share, however long they are and however many versions they have met.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fleuve.types import Int32Array

CHUNK = 1 << 15
"""Steps in one array. An array lives for as long as an answer that came from it."""


class VersionHistory:
    """Steps are counted from 0; `version` is what the next step samples with. `oldest()` says from which step on
    anybody may still ask; it is called when an array is full."""

    def __init__(self, version: int, oldest: Callable[[], int], chunk: int = CHUNK) -> None:
        self.version = version
        self._oldest = oldest
        self._chunk = chunk
        self._first = 0  # the step that `_steps[0]` is of
        self._filled = 0  # steps from here on are not written down yet
        self._steps = np.empty(chunk, np.int32)

    def load(self, version: int, step: int) -> None:
        """New weights, from step `step` on."""
        self.reach(step)
        self.version = version

    def between(self, start: int, end: int) -> Int32Array:
        """The versions of the steps from `start` up to, without, `end`: read-only, `[end - start]`."""
        self.reach(end)
        out = self._steps[start - self._first : end - self._first]
        out.flags.writeable = False
        return out

    def reach(self, step: int) -> None:
        """The steps up to, without, `step` are done."""
        if step - self._first > len(self._steps):
            oldest = min(self._oldest(), step)
            kept = self._steps[oldest - self._first : max(self._filled, oldest) - self._first]
            self._steps = np.empty(max(self._chunk, 2 * (step - oldest)), np.int32)
            self._steps[: len(kept)] = kept
            self._first = oldest
        if step > self._filled:
            start = max(self._filled, self._first)
            self._steps[start - self._first : step - self._first] = self.version
            self._filled = step
