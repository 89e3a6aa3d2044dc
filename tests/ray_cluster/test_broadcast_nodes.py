"""Weights are broadcast to a node that shares no files: over its own address, without a copy of the file there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray_runs import apart, assert_whole, can_unshare, cluster, running

pytestmark = pytest.mark.ray


@pytest.mark.skipif(not can_unshare(), reason="no mounts of one's own here")
def test_weights_are_broadcast_to_a_node_that_shares_no_files(tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    with cluster(cpus=2) as nodes, apart(nodes.address, weights) as node:
        flags = ("--weights.transport", "broadcast", "--weights.path", str(weights))
        with running(tmp_path / "there", nodes.address, *flags, steps=4) as run:
            run.wait_for(lambda: run.steps >= 2)
            engines = [run.engine(name) for name in ("worker-0", "worker-1")]
            (far,) = [e for e in engines if node in [p.pid for p in e.parents()]]
            assert not list(Path(f"/proc/{far.pid}/root{weights}").rglob("*.safetensors"))
            assert assert_whole(run) == 4
            last = json.loads((run.directory / "run" / "metrics.jsonl").read_text().splitlines()[-1])
            assert (last["weights/broadcast"], last["weights/missed"]) == (8, 0)
