"""Where a process cannot be, the run ends at its start with a line that says what it wanted."""

from __future__ import annotations

import pytest
from ray_runs import apart, can_unshare, cluster, gone, running

pytestmark = pytest.mark.ray


def test_a_worker_for_which_there_is_no_room(tmp_path):
    with cluster(cpus=2) as nodes, running(tmp_path, nodes.address, "--launch.ray.place_timeout", "3") as run:
        assert run.process.wait(timeout=120) == 1
        assert "error: worker-1 has no place after 3 s: it needs 1 CPU on one node; free: " in run.output
        assert "Traceback" not in run.output
        assert gone(run.processes)


@pytest.mark.skipif(not can_unshare(), reason="no mounts of one's own here")
def test_a_trainer_on_a_node_that_does_not_see_the_run(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    with cluster(cpus=0) as nodes, apart(nodes.address, there, cpus=3), running(there, nodes.address) as run:
        assert run.process.wait(timeout=120) == 1
        assert "which does not see run: checkpoints need a run_dir on a file system that all nodes share" in run.output
        assert "Traceback" not in run.output
