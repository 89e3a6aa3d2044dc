"""The controller's reports, fanned out to the run directory's files and the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.observe import failed
from fleuve.observe.live import Progress, view_for
from fleuve.observe.metrics import MetricsFile, TensorBoard
from fleuve.observe.rollouts import write_rollouts
from fleuve.observe.rundir import RunDirectory
from fleuve.observe.trace import Trace
from fleuve.types import Batch


class RunObserver:
    """`contracts.Observer` for a real run. `clock` is the event loop's (`time.monotonic`, or a simulator's).

    Close it, or use it as a context manager: the live view gives the terminal back then.
    """

    def __init__(self, run: RunDirectory, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._settings = settings
        self._clock = clock
        self._origin = clock()
        self._metrics = MetricsFile(run.metrics)
        self._tensorboard = TensorBoard(run.tensorboard) if settings.observe.tensorboard else None
        self._trace = Trace(run.trace, self._origin) if settings.observe.trace else None
        self._log = run.log.open("a", encoding="utf-8", buffering=1)
        self._view: Progress = view_for(settings)
        self._view.start()
        self._closed = False
        self._gauges: list[Callable[[], Mapping[str, float]]] = []
        if run.moved_to:
            self.note(f"the run that was in {run.root} is now in {run.moved_to}")

    def also(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Put what `read()` returns at each step into its row of metrics: numbers of a part of the run that the
        controller knows nothing of."""
        self._gauges.append(read)

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        """One trained step, to every file and the terminal.

        Raises:
            UserError: the disk is full or the run directory cannot be written any more.
        """
        with _disk_errors_named(self._run):
            if self._settings.observe.rollouts:
                write_rollouts(self._run.rollout_file(int(metrics["step"])), batch)
            row = {**metrics, "time/elapsed": self._clock() - self._origin}
            for read in self._gauges:
                row |= read()
            self._metrics.write(row)
            if self._tensorboard:
                self._tensorboard.write(row)
            if self._trace:
                self._trace.flush()
        self._view.step(row)
        if skipped := int(metrics.get(failed.COUNT, 0)):
            with _disk_errors_named(self._run):
                file = failed.save_failed(self._run.root, self._settings.model_dump(mode="json"), batch, metrics)
            self.note(
                f"step {metrics['step']:.0f}: {skipped} updates skipped: the loss or its gradient is not finite; the "
                f"batch is kept in {file}"
            )

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None:
        if self._trace:
            with _disk_errors_named(self._run):
                self._trace.span(track, name, start, end, args)

    def count(self, name: str, value: float, at: float) -> None:
        self._view.count(name, value)
        if self._trace:
            with _disk_errors_named(self._run):
                self._trace.count(name, value, at)

    def activity(self, who: str, what: str) -> None:
        self._view.activity(who, what)

    def note(self, message: str) -> None:
        with _disk_errors_named(self._run):
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
        self._view.note(message)

    def close(self) -> None:
        """Give the terminal back, then put everything on disk. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._view.stop()
        with _disk_errors_named(self._run):
            for part in (self._metrics, self._tensorboard, self._trace, self._log):
                if part:
                    part.close()

    def __enter__(self) -> RunObserver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _disk_errors_named(run: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or run.root}: cannot be written: {error.strerror}") from error
