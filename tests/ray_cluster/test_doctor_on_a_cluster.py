"""`fleuve doctor` looks at every node."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from ray_runs import CONFIG, QUIET, ROOT, cluster

pytestmark = pytest.mark.ray


def test_every_node_is_examined(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG.format(steps=1))
    with cluster(cpus=1) as nodes:
        nodes.add_node(num_cpus=1)
        done = subprocess.run(
            [sys.executable, "-m", "fleuve", "doctor", "--json", "config.toml"],
            cwd=tmp_path,
            env={**os.environ, **QUIET, "RAY_ADDRESS": nodes.address, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    by_check = {
        check: [line for line in found if line["check"] == check] for check in {line["check"] for line in found}
    }
    assert by_check["Ray cluster"][0]["found"] == "2 nodes, 2 CPU and 0 GPU in all"
    assert len(by_check["torch"]) == 2, "this machine is the head node, and is examined once"
    assert [line["found"].startswith("4 MB over 2 ranks") for line in by_check["gloo"]] == [True, True]
    assert len(by_check["clock skew"]) == len(by_check["shared files"]) == len(by_check["priority"]) == 2
    assert all(abs(float(line["found"].split()[0])) < 1 for line in by_check["clock skew"])
    assert {line["found"] for line in by_check["shared files"]} == {"sees the run directory"}
    assert list(tmp_path.iterdir()) == [tmp_path / "config.toml"], "nothing is left of the looks"
