"""The timeline of a simulated run: a `trace.json` like a real run's, but never in the place of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from fleuve.errors import UserError
from fleuve.observe.trace import Trace
from fleuve.simulate.outputs import beside, check_output

NAME = "simulated run"
"""What the timeline calls the run: by that a file of our own making is known."""

_HEAD = 4096


def check_timeline(path: Path, flag: str = "--trace") -> None:
    """Whether a timeline can be written to `path`: there is nothing yet, or the timeline of another simulation.

    Raises:
        UserError: it cannot, or there is another file, such as the timeline of a real run.
    """
    check_output(flag, path)
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head and f'"{NAME}"'.encode() not in head:
        raise UserError(
            f"{flag} {path}: there is such a file already, and it is not the timeline of a simulation; give another "
            "name, or remove it"
        )


class Timeline:
    """Spans and counters, in virtual seconds. It takes its place when it is whole; `failed` is called once if it cannot
    be written, and nothing more is then.

    Raises:
        UserError: see `check_timeline`.
    """

    def __init__(self, path: Path, failed: Callable[[], None]) -> None:
        check_timeline(path)
        self._path = path
        self._failed = failed
        self._error: OSError | None = None
        self._beside = beside(path)
        self._open = True
        with self._told():
            self._trace = Trace(self._beside, 0.0, NAME)

    def span(self, track: str, name: str, start: float, end: float, args: dict[str, object]) -> None:
        """From `start` to `end` on `track`."""
        if self._error is None:
            with self._noticed():
                self._trace.span(track, name, start, end, args)

    def count(self, name: str, value: float, at: float) -> None:
        """A value that holds from `at` until its next."""
        if self._error is None:
            with self._noticed():
                self._trace.count(name, value, at)

    def keep(self) -> None:
        """It is whole.

        Raises:
            UserError: it could not be written.
        """
        with self._told():
            if self._error is not None:
                raise self._error
            self._close()
            self._beside.replace(self._path)

    def discard(self) -> None:
        """It is not going to be whole; after `keep` there is nothing to discard."""
        with contextlib.suppress(OSError):
            self._close()
        self._beside.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._trace.close()

    @contextlib.contextmanager
    def _noticed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = error
            self._failed()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"--trace {self._path}: cannot be written: {error.strerror or error}") from None
