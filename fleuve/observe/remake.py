"""Steps that are made once more when a run is continued: what is missing of them in the reports is made up for."""

from __future__ import annotations

from collections.abc import Set

from fleuve.config.settings import Settings
from fleuve.contracts import Observer
from fleuve.control.gate import Gate
from fleuve.control.reporting import Reporter
from fleuve.types import Batch, StepResult


class Remake:
    """Call it with each batch and what it came to, as often as that is made. `reported` are the steps that have their
    row already."""

    def __init__(self, settings: Settings, observer: Observer, reported: Set[int]) -> None:
        self._observer = observer
        self._reported = set(reported)
        self._gate = Gate(settings.control.batch_size, settings.control.max_staleness)

    def __call__(self, batch: Batch, result: StepResult) -> None:
        self._observer.activity("trainer", f"step {result.version} once more")
        if result.version not in self._reported:
            self._reported.add(result.version)
            seconds = sum(value for name, value in result.metrics.items() if name.startswith("time/"))
            times = {"time/step": seconds, "time/wait_for_batch": 0.0, "time/publish": 0.0}
            Reporter(self._observer, self._gate).step(batch, result, times)
