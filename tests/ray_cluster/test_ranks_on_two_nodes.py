"""A trainer whose ranks are on two nodes."""

from __future__ import annotations

import pytest
from ray_runs import assert_whole, cluster, raylet_of, running, words

pytestmark = pytest.mark.ray


def test_two_ranks_on_two_nodes_train_together_and_come_back_when_one_is_killed(tmp_path):
    with cluster(cpus=1) as nodes:
        nodes.add_node(num_cpus=2)
        flags = ("--trainer.ranks", "2", "--rollout.workers", "1")
        with running(tmp_path, nodes.address, *flags) as run:
            run.wait_for(lambda: run.steps >= 2)
            ranks = [p for p in run.processes() if "fleuve.train" in words(p)]
            assert len({raylet_of(rank) for rank in ranks}) == len(ranks) == 2
            ranks[-1].kill()
            run.wait_for(lambda: "the trainer is back at version" in run.output)
            before = run.steps
            run.wait_for(lambda: run.steps >= before + 2)
            run.stop()
            assert_whole(run, code=130)
