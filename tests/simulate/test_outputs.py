"""What the simulator writes: found out before the work whether it can; what is not its own is never replaced."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from fleuve.errors import UserError
from fleuve.observe.trace import Trace
from fleuve.simulate.outputs import check_output
from fleuve.simulate.plan_report import check_writable
from fleuve.simulate.simulate_report import check_picture
from fleuve.simulate.timeline import Timeline, check_timeline


def nothing() -> None:
    """To be called where a timeline fails."""


def written(path: Path, spans: int) -> None:
    timeline = Timeline(path, nothing)
    for number in range(spans):
        timeline.span("trainer", f"step {number}", number, number + 1, {})
    timeline.keep()
    timeline.discard()


def names(path: Path) -> list[str]:
    return [e["name"] for e in json.loads(path.read_text()) if e["ph"] == "X"]


def test_the_timeline_of_another_simulation_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for spans in (3, 600, 2):
        written(path, spans)
        assert names(path) == [f"step {i}" for i in range(spans)]
    assert list(tmp_path.iterdir()) == [path]


def test_a_real_runs_timeline_and_any_other_file_stay_as_they_are(tmp_path: Path) -> None:
    real, other = tmp_path / "trace.json", tmp_path / "notes.txt"
    trace = Trace(real, 0.0)
    trace.span("trainer", "step 0", 0.0, 1.0, {})
    trace.close()
    other.write_text("mine")
    for path in (real, other):
        before = path.read_bytes()
        with pytest.raises(UserError, match="not the timeline of a simulation; give another name"):
            check_timeline(path)
        with pytest.raises(UserError, match="not the timeline of a simulation"):
            Timeline(path, nothing)
        assert path.read_bytes() == before


def test_an_empty_file_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "trace.json").touch()
    written(tmp_path / "trace.json", 1)
    assert names(tmp_path / "trace.json") == ["step 0"]


def test_a_timeline_that_does_not_get_whole_leaves_nothing_behind(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json", nothing)
    timeline.span("trainer", "step 0", 0.0, 1.0, {})
    timeline.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_one_line_and_is_not_asked_again(tmp_path: Path) -> None:
    failures: list[int] = []
    timeline = Timeline(tmp_path / "trace.json", lambda: failures.append(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for number in range(1000):
            timeline.span("trainer", f"step {number}", number, number + 1, {})
        with pytest.raises(UserError, match=r"--trace .*trace.json: cannot be written: File too large$"):
            timeline.keep()
        timeline.discard()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failures == [1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("check", [lambda p: check_output("--x", p), check_timeline, check_picture, check_writable])
def test_what_can_be_no_file_is_refused_by_every_output(check: object, tmp_path: Path) -> None:
    assert callable(check)
    for path, complaint in (
        (tmp_path, "is a directory|is such a file already"),
        (Path("/dev/full"), "is no ordinary file|is such a file already"),
        (Path("/proc/a.png"), "cannot be written"),
        (tmp_path / "nowhere" / "a.png", "no such directory"),
    ):
        with pytest.raises(UserError, match=complaint) as error:
            check(path)
        assert "\n" not in str(error.value)
    check(tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.xyz", "a", "a.png.toml"])
def test_a_picture_is_of_a_kind_that_can_be_drawn(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such kind of picture; end its name in \.png"):
        check_picture(tmp_path / name)
