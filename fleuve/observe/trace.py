"""The run's timeline as Chrome trace events: `trace.json` opens in Perfetto or chrome://tracing.

The file is a JSON array and ends in `]` after every write: each write overwrites the bracket with its events and a new
bracket in one system call, so that what a killed run leaves is valid too, and a run that is continued goes on in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

_END = b"\n]\n"
_PROCESS = b'"name":"process_name"'
_BUFFERED_EVENTS = 256


class Trace:
    """Spans and counters, `origin` being second 0. Spans of the track `group` overlap: each takes a free lane.
    The run is called `name`."""

    def __init__(self, path: Path, origin: float, name: str = "run") -> None:
        lives, self._size = _earlier(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | (0 if lives else os.O_TRUNC), 0o644)
        self._origin = origin
        self._run, self._groups = 2 * lives + 1, 2 * lives + 2  # process ids: tracks of the run, groups in flight
        self._tracks: dict[str, int] = {}
        self._lanes: list[float] = []  # the end of the last span in each lane
        self._events: list[bytes] = []
        again = f", continued ({lives})" if lives else ""
        self._name("process_name", self._run, 0, f"{name}{again}")
        self._name("process_name", self._groups, 0, f"groups in flight{again}")
        self.flush()

    def span(self, track: str, name: str, start: float, end: float, args: dict[str, object]) -> None:
        """From `start` to `end` on `track`."""
        pid, tid = (self._groups, self._lane(start, end)) if track == "group" else (self._run, self._track(track))
        self._add(
            {
                "ph": "X",
                "name": name,
                "cat": track,
                "pid": pid,
                "tid": tid,
                "ts": self._microseconds(start),
                "dur": max(0, round((end - start) * 1e6)),
                "args": args,
            }
        )

    def count(self, name: str, value: float, at: float) -> None:
        """A value that holds from `at` until its next."""
        ts = self._microseconds(at)
        self._add({"ph": "C", "name": name, "pid": self._run, "tid": 0, "ts": ts, "args": {"value": value}})

    def flush(self) -> None:
        """Put what is buffered on disk."""
        if not self._events:
            return
        start = self._size - len(_END) if self._size else 0
        text = (b",\n" if self._size else b"[\n") + b",\n".join(self._events) + _END
        written = 0
        while written < len(text):
            written += os.pwrite(self._fd, text[written:], start + written)
        self._size = start + len(text)
        self._events.clear()

    def close(self) -> None:
        """Put the rest on disk, and let the file go, whether or not that worked."""
        try:
            self.flush()
        finally:
            os.close(self._fd)

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(msgspec.json.encode(event, enc_hook=str))
        if len(self._events) >= _BUFFERED_EVENTS:
            self.flush()

    def _microseconds(self, at: float) -> int:
        return round((at - self._origin) * 1e6)

    def _track(self, track: str) -> int:
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks) + 1
            self._name("thread_name", self._run, self._tracks[track], track)
        return self._tracks[track]

    def _lane(self, start: float, end: float) -> int:
        """The first lane whose last span has ended by `start`. Spans arrive in the order of their ends."""
        for lane, busy_until in enumerate(self._lanes):
            if busy_until <= start:
                self._lanes[lane] = end
                return lane + 1
        self._lanes.append(end)
        self._name("thread_name", self._groups, len(self._lanes), f"lane {len(self._lanes)}")
        return len(self._lanes)

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._add({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})


def _earlier(path: Path) -> tuple[int, int]:
    """How many lives of the run a trace tells of already, and its size; none if it is not there or not whole."""
    if not path.exists():
        return 0, 0
    names = 0
    with path.open("rb") as file:
        tail = b""
        while chunk := file.read(1 << 20):
            names += (tail + chunk).count(_PROCESS) - tail.count(_PROCESS)
            tail = (tail + chunk)[-len(_PROCESS) :]
    size = path.stat().st_size
    return (names // 2, size) if tail.endswith(_END) else (0, 0)
