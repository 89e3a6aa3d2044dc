"""The head of the cluster is lost, and every node with it."""

from __future__ import annotations

import signal
import time

import psutil
import pytest
from ray_runs import assert_whole, cluster, gone, running

pytestmark = pytest.mark.ray

RAY_ENDS_ALL = 60.0
"""Seconds after which Ray ends whoever does not reach the head."""


def end_head(nodes: object, number: int) -> None:
    """Send a signal to every process of the head node, or to the head itself where it is only to be stopped."""
    for name, started in nodes.head_node.all_processes.items():
        if number == signal.SIGKILL or name == "gcs_server":
            for process in started:
                process.process.send_signal(number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_whose_head_is_lost_ends_with_a_line_and_goes_on_in_another_cluster(tmp_path, number):
    with cluster(cpus=2) as nodes:
        nodes.add_node(num_cpus=2)
        with running(tmp_path, nodes.address) as run:
            run.wait_for(lambda: run.steps >= 2)
            family = psutil.Process(run.process.pid).children(recursive=True)
            end_head(nodes, number)
            began = time.monotonic()
            assert run.process.wait(timeout=RAY_ENDS_ALL + 60) == 1, run.output
            print(f"ended after {time.monotonic() - began:.0f} s")
            assert f"error: the head of the Ray cluster at {nodes.address} has not answered for 30 s" in run.output
            assert "started again, the run goes on from there" in run.output
            assert "Traceback" not in run.output
            assert gone(run.processes, within=RAY_ENDS_ALL)
            assert gone(lambda: [p for p in family if p.is_running()])
            made = run.steps
        end_head(nodes, signal.SIGCONT)
    with cluster(cpus=2) as nodes:
        nodes.add_node(num_cpus=1)
        with running(tmp_path, nodes.address) as run:
            run.wait_for(lambda: run.steps >= made + 2)
            run.stop()
            assert assert_whole(run, code=130) >= made + 2
