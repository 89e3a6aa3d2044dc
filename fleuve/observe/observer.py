"""The controller's reports, fanned out to the run directory's files and the terminal.

A disk can be full. Metrics and rollouts are the run's record: it does not go on without them. The trace, TensorBoard's
file and the log only say again, or for the eye, what there is to say: it goes on without one that cannot be written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from fleuve.config.settings import Settings
from fleuve.contracts import RunError
from fleuve.observe import failed
from fleuve.observe.earlier import Earlier
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

    def __init__(
        self,
        run: RunDirectory,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        earlier: Earlier | None = None,
    ) -> None:
        self._run = run
        self._settings = settings
        self._clock = clock
        self._origin = clock() - (
            earlier.elapsed if earlier else 0.0
        )  # a run that is continued goes on from where its clock stood
        self._metrics = MetricsFile(run.metrics)
        self._tensorboard = TensorBoard(run.tensorboard) if settings.observe.tensorboard else None
        self._trace = Trace(run.trace, self._origin) if settings.observe.trace else None
        self._log: TextIO | None = run.log.open("a", encoding="utf-8", buffering=1)
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
            RunError: the disk is full or the run directory cannot be written any more.
        """
        with _record(self._run):
            if self._settings.observe.rollouts:
                write_rollouts(self._run.rollout_file(int(metrics["step"])), batch)
            row = {**metrics, "time/elapsed": self._clock() - self._origin}
            for read in self._gauges:
                row |= read()
            self._metrics.write(row)
        if self._tensorboard:
            self._try("_tensorboard", self._run.tensorboard, partial(self._tensorboard.write, row))
        if self._trace:
            self._try("_trace", self._run.trace, self._trace.flush)
        self._view.step(row)
        if skipped := int(metrics.get(failed.COUNT, 0)):
            with _record(self._run):
                file = failed.save_failed(self._run.root, self._settings.model_dump(mode="json"), batch, metrics)
            self.note(
                f"step {metrics['step']:.0f}: {skipped} updates skipped: the loss or its gradient is not finite; the "
                f"batch is kept in {file}"
            )

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None:
        if self._trace:
            self._try("_trace", self._run.trace, partial(self._trace.span, track, name, start, end, args))

    def count(self, name: str, value: float, at: float) -> None:
        self._view.count(name, value)
        if self._trace:
            self._try("_trace", self._run.trace, partial(self._trace.count, name, value, at))

    def activity(self, who: str, what: str) -> None:
        self._view.activity(who, what)

    def note(self, message: str) -> None:
        if self._log:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n"
            self._try("_log", self._run.log, partial(self._log.write, line))
        self._view.note(message)

    def close(self) -> None:
        """Put everything on disk and give the terminal back. May be called again."""
        if self._closed:
            return
        self._closed = True
        for part in (self._metrics, self._tensorboard, self._trace, self._log):
            if part:
                with suppress(OSError):  # metrics are on the disk already; of the others only the end is lost
                    part.close()
        self._view.stop()

    def _try(self, part: str, path: Path, write: Callable[[], object]) -> None:
        """Write to one of the files that the run can go on without, at `path`; if it cannot be, go on without."""
        try:
            write()
        except OSError as error:
            setattr(self, part, None)
            self._view.note(f"{path}: cannot be written: {error.strerror}; the run goes on without it")

    def __enter__(self) -> RunObserver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _record(run: RunDirectory) -> Iterator[None]:
    """What goes wrong in writing the run's record, by the name of what cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename or run.root}: cannot be written: {error.strerror}") from error
