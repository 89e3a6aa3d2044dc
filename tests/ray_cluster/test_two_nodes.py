"""A run on two nodes of a Ray cluster: what dies there comes back where there is a place, and the run goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from ray_runs import apart, assert_whole, can_unshare, cluster, gone, raylet_of, running, words

pytestmark = pytest.mark.ray


def test_a_worker_and_then_its_node_are_killed_and_the_run_loses_nothing(tmp_path):
    with cluster(cpus=2) as nodes:
        second = nodes.add_node(num_cpus=1)
        with running(tmp_path, nodes.address) as run:
            run.wait_for(lambda: run.steps >= 2)
            engines = {name: run.engine(name) for name in ("worker-0", "worker-1")}
            raylets = {name: raylet_of(engine) for name, engine in engines.items()}
            assert len(set(raylets.values())) == 2, "spread over both nodes"
            head = nodes.head_node.all_processes["raylet"][0].process.pid
            (there,) = [name for name, raylet in raylets.items() if raylet != head]

            engines[there].kill()
            run.wait_for(lambda: f"{there} serves" in run.output)
            assert "killed by SIGKILL" in run.output
            again = run.engine(there)
            assert raylet_of(again) == raylets[there], "in the place that it had"

            before = run.steps
            nodes.remove_node(second, allow_graceful=False)
            run.wait_for(lambda: run.output.count(f"{there} is given up") == 2)
            assert gone(lambda: [again] if again.is_running() else [])
            run.wait_for(lambda: run.steps >= before + 2)
            nodes.add_node(num_cpus=1)
            run.wait_for(lambda: run.output.count(f"{there} serves") == 2)
            run.stop()
            assert_whole(run, code=130)
            assert "serving builtin:small" in run.log("worker-0")
            assert run.log(there).count("serving builtin:small") == 3


@pytest.mark.skipif(not can_unshare(), reason="no mounts of one's own here")
def test_weights_are_brought_to_a_node_that_shares_no_files(tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    with cluster(cpus=2) as nodes, apart(nodes.address, weights) as node:
        flags = ("--weights.transport", "path", "--weights.path", str(weights))
        with running(tmp_path / "there", nodes.address, *flags) as run:
            run.wait_for(lambda: run.steps >= 1)
            (far,) = [e for e in map(run.engine, ("worker-0", "worker-1")) if node in [p.pid for p in e.parents()]]
            seen = f"/proc/{far.pid}/root{weights}"
            run.wait_for(lambda: any(p.name.endswith(".safetensors") for p in Path(seen).rglob("weights-*")))
            run.wait_for(lambda: run.steps >= 4)
            run.stop()
            assert_whole(run, code=130)
            copy = next(iter(Path(f"/proc/{node}/root{weights}").iterdir()), None)
            assert copy is None, "the copy goes with the run"


def test_a_run_that_is_killed_leaves_nothing_in_the_cluster_and_goes_on_when_it_is_started_again(tmp_path):
    with cluster(cpus=2) as nodes:
        nodes.add_node(num_cpus=1)
        with running(tmp_path, nodes.address) as run:
            run.wait_for(lambda: run.steps >= 2)
            assert len(run.processes()) == 3
            run.end()
            assert gone(run.processes)
            made = run.steps
        with running(tmp_path, nodes.address) as run:
            run.wait_for(lambda: run.steps >= made + 2)
            run.stop()
            assert assert_whole(run, code=130) >= made + 2


def test_a_cluster_of_ones_own_ends_with_the_run_that_is_killed(tmp_path):
    with running(tmp_path, None, "--launch.ray.address", "local", "--rollout.workers", "1") as run:
        run.wait_for(lambda: run.steps >= 1)
        family = psutil.Process(run.process.pid).children(recursive=True)
        assert any(Path(p.exe()).name == "raylet" for p in family)
        run.process.send_signal(signal.SIGKILL)
        # Two helpers of Ray's own look for their head node for a minute; what computes is gone at once.
        assert gone(lambda: [p for p in family if p.is_running() and words(p) and "Agent" not in words(p)])
