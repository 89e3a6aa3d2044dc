"""The timeline of a run that is continued goes on in the same file."""

import json
from pathlib import Path

from fleuve.observe.trace import Trace


def events(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())


def test_each_life_of_a_run_has_tracks_of_its_own_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for life in range(3):
        trace = Trace(path, origin=-10.0 * life)
        trace.span("trainer", f"step {life}", 1.0, 2.0, {})
        trace.span("group", f"row {life}", 1.0, 2.0, {})
        trace.close()
    spans = [e for e in events(path) if e["ph"] == "X"]
    assert [e["name"] for e in spans] == ["step 0", "row 0", "step 1", "row 1", "step 2", "row 2"]
    assert len({e["pid"] for e in spans}) == 6
    assert [e["ts"] for e in spans[::2]] == [1_000_000, 11_000_000, 21_000_000]
    assert [e["args"]["name"] for e in events(path) if e["name"] == "process_name"][2] == "run, continued (1)"


def test_a_file_that_is_no_whole_trace_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[\n{")
    Trace(path, 0.0).close()
    assert len(events(path)) == 2
