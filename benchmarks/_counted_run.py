"""`fleuve train`, which also writes down where its rollout workers listen: `_counted_run.py FILE CONFIG ...`.

A line of FILE is a worker's process that came up: `{"pid": ..., "url": ..., "token": ...}`. For a benchmark that counts
their tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fleuve.cli import main
from fleuve.launch.engines import EngineProcesses
from fleuve.rollout.client import EngineClient


class CountedProcesses(EngineProcesses):
    """Tells of each that it opens."""

    file: Path

    async def open(self, worker: str) -> EngineClient:
        client = await super().open(worker)
        child = next(child for child in self.children if child.name == worker)
        with self.file.open("a") as lines:
            lines.write(json.dumps({"pid": child.pid, "url": child.url, "token": child.token}) + "\n")
        return client


if __name__ == "__main__":
    import fleuve.launch.local

    CountedProcesses.file = Path(sys.argv.pop(1))
    fleuve.launch.local.EngineProcesses = CountedProcesses  # type: ignore[misc]
    sys.argv[1:1] = ["train"]
    sys.exit(main())
