"""The wall clock can jump, by hours, at any moment: nothing may wait by it."""

from __future__ import annotations

import ast
from pathlib import Path

import fleuve

ROOT = Path(fleuve.__file__).parent

SHOWN = {
    "config/light_tokenizer.py": "the date, for chat templates that show it",
    "doctor/facts.py": "a node's clock, to be compared with others'",
    "doctor/ray_nodes.py": "the same, on every node",
    "engine/openai.py": "when an answer was made, for the client",
    "engine/service.py": "when a model was opened, for the client",
    "observe/metrics.py": "TensorBoard's axis",
    "observe/observer.py": "the log's lines",
}
"""Where the wall clock is read, and what for. Deadlines are the event loop's, or `time.monotonic`."""

WALL = {
    "time",
    "time_ns",
    "localtime",
    "gmtime",
    "strftime",
    "ctime",
    "asctime",
    "now",
    "utcnow",
    "today",
    "fromtimestamp",
}
CLOCKS = {"time", "datetime", "date"}


def reads_wall_clock(tree: ast.AST) -> bool:
    """Whether `time.time()`, `datetime.now()` and the like are called, or imported to be."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in CLOCKS and {a.name for a in node.names} & WALL:
            return True
        if isinstance(node, ast.Attribute) and node.attr in WALL and isinstance(node.value, ast.Name | ast.Attribute):
            name = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if name in CLOCKS:
                return True
    return False


def test_the_check_sees_what_it_looks_for() -> None:
    for source in ("import time\ntime.time()", "from time import time", "import datetime\ndatetime.datetime.now()"):
        assert reads_wall_clock(ast.parse(source))
    for source in ("import time\ntime.monotonic()", "loop.time()", "self._now()", "import time\ntime.perf_counter()"):
        assert not reads_wall_clock(ast.parse(source))


def test_no_deadline_reads_the_wall_clock() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if reads_wall_clock(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(SHOWN), "a wait by the wall clock ends too early, or never, when it jumps"
