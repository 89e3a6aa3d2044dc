"""When a checkpoint is due: by steps, by time, and when somebody asks."""

from __future__ import annotations

from fleuve.config.settings import CheckpointSettings


class Saving:
    """A pure state machine; `now` is any clock's, in seconds."""

    def __init__(self, settings: CheckpointSettings, now: float = 0.0) -> None:
        self.asked = False
        self._every = settings.every
        self._seconds = settings.every_minutes * 60
        self._last = now

    def due(self, version: int, now: float) -> bool:
        """After the step that made `version`."""
        by_step = bool(self._every) and version % self._every == 0
        by_time = bool(self._seconds) and now - self._last >= self._seconds
        return self.asked or by_step or by_time

    def begun(self, now: float) -> None:
        """A checkpoint is being made."""
        self.asked = False
        self._last = now
