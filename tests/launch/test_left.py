"""What is said of a run that failed is what the next start finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from left_runs import leave_a_run, make, read

from fleuve.launch.left import what_is_left
from fleuve.launch.resume import open_run
from fleuve.observe.rundir import RunDirectory

AGAIN = "the journal leads to version 8: started again, the run goes on from there"


@pytest.mark.parametrize(
    ("steps", "saved", "said"),
    [
        (8, (), f"no checkpoint is saved; {AGAIN}"),
        (8, (3, 6), "saved: {run}/checkpoints/step-000006; " + AGAIN),
        (8, (8,), "saved: {run}/checkpoints/step-000008"),
        (0, (), "no checkpoint is saved, and no step was made; the run is in {run}"),
    ],
)
def test_a_run_that_failed_says_how_far_it_can_be_continued(
    tmp_path: Path, steps: int, saved: tuple[int, ...], said: str
) -> None:
    config = make(tmp_path)
    run = leave_a_run(config, steps, saved)
    assert what_is_left(RunDirectory(run)) == said.format(run=run)
    opened = open_run(config, "auto")
    assert read(opened, config).version == steps
    opened.run.release()


def test_where_the_next_start_would_refuse_nothing_is_promised(tmp_path: Path) -> None:
    run = leave_a_run(make(tmp_path), 8, (2, 3, 6))
    for marker in (run / "checkpoints").glob("*/COMMITTED"):
        marker.unlink()
    assert what_is_left(RunDirectory(run)) == f"no checkpoint is saved; what the run came to is in {run}"
