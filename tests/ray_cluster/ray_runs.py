"""Clusters of Ray on this machine, and real runs of the small model on them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
FOR_LONG = 100_000
"""Steps of a run that is told to end."""

CONFIG = """
run_dir = "run"
steps = {steps}
seed = 1
[model]
path = "builtin:small"
[data]
train = "procedural:chain"
[rollout]
workers = 2
group_size = 4
max_new_tokens = 256
health_timeout = 8
[control]
batch_size = 4
[trainer]
learning_rate = 1e-3
[launch]
backend = "ray"
[launch.ray]
strategy = "spread"
place_timeout = 20
[observe]
live = "off"
"""

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


@contextmanager
def cluster(cpus: int) -> Iterator[object]:
    """`ray.cluster_utils.Cluster` with a head node, which ends with all its processes."""
    os.environ.update(QUIET)
    from ray.cluster_utils import Cluster

    class PatientCluster(Cluster):
        """Ray gives a node 30 seconds to come up, and a busy machine takes longer: then it is tried again."""

        def add_node(self, **arguments: object) -> object:
            for tries_left in (2, 1, 0):
                there = set(psutil.Process().children(recursive=True))
                try:
                    return super().add_node(**arguments)
                except Exception as error:
                    if "timed out during startup" not in str(error) or not tries_left:
                        raise
                    for late in set(psutil.Process().children(recursive=True)) - there:
                        with suppress(psutil.NoSuchProcess):
                            late.kill()
            raise AssertionError("unreachable")

    logging.getLogger("ray").setLevel(logging.ERROR)
    made = PatientCluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


class Run:
    """`fleuve train`, in a directory of its own."""

    def __init__(self, directory: Path, address: str | None, *flags: str, steps: int) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        (directory / "config.toml").write_text(CONFIG.format(steps=steps))
        env = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env.pop("RAY_ADDRESS", None)
        if address is not None:
            env["RAY_ADDRESS"] = address
        with (directory / "output.txt").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleuve", "train", "config.toml", *flags],
                cwd=directory,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return (self.directory / "output.txt").read_text()

    @property
    def steps(self) -> int:
        metrics = self.directory / "run" / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def log(self, name: str) -> str:
        return (self.directory / "run" / "logs" / f"{name}.log").read_text()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def engine(self, name: str) -> psutil.Process:
        """The process that is `name` now, wherever it runs."""
        (found,) = [p for p in self.processes() if "fleuve.engine" in p.cmdline() and f'"name": "{name}"' in words(p)]
        return found

    def processes(self) -> list[psutil.Process]:
        """All of this run's trainers and engines: their options name its weights directory."""
        return [p for p in psutil.process_iter() if f"/fleuve-{self.process.pid}-" in words(p)]

    def stop(self) -> None:
        """As Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running(directory: Path, address: str | None, *flags: str, steps: int = FOR_LONG) -> Iterator[Run]:
    run = Run(directory, address, *flags, steps=steps)
    try:
        yield run
    finally:
        run.end()


def words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def gone(look: Callable[[], list[psutil.Process]], within: float = 15.0) -> bool:
    """Whether nothing is left in time."""
    deadline = time.monotonic() + within
    while look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def raylet_of(process: psutil.Process) -> int:
    """The process id of the raylet that `process` descends from."""
    return next(p.pid for p in process.parents() if Path(p.exe()).name == "raylet")


def assert_whole(run: Run, code: int = 0) -> int:
    """The run has ended well: every step trained, every group whole and trained once, nothing left over. Its steps."""
    assert run.process.wait(timeout=240) == code, run.output
    rows = [json.loads(line) for line in (run.directory / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = len(rows)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    groups = []
    for path in (run.directory / "run" / "rollouts").glob("*.jsonl"):
        groups += [json.loads(line) for line in path.read_text().splitlines()]
    assert len(groups) == len({group["group"] for group in groups}) == steps * 4
    assert all(len(group["trajectories"]) == 4 for group in groups)
    assert rows[-1].get("groups/dropped", 0) == 0, run.output
    assert max(row["staleness/max"] for row in rows) <= 2
    assert list((run.directory / "run" / "checkpoints").glob("*/COMMITTED"))
    assert gone(run.processes)
    assert not list(Path("/dev/shm").glob(f"fleuve-{run.process.pid}-*"))
    return steps


def can_unshare() -> bool:
    """Whether a process can have mounts of its own here."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def apart(address: str, directory: Path, cpus: int = 1) -> Iterator[int]:
    """A node of the cluster at `address` that has a file system of its own in place of `directory`; its process. It is
    there: a run would wait for its places no longer than `place_timeout`."""
    from ray._raylet import GcsClient

    head = GcsClient(address=address)
    before = len(head.get_all_node_info())
    ray = f"{sys.executable} -m ray.scripts.scripts start --address={address} --num-cpus={cpus} --block"
    process = subprocess.Popen(
        [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            f"mount -t tmpfs none {directory} && exec {ray}",
        ],
        env={**os.environ, **QUIET},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while len(head.get_all_node_info()) == before:
            assert process.poll() is None, "the node did not come up"
            assert time.monotonic() < deadline, "the node is not there"
            time.sleep(0.2)
        yield process.pid
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(timeout=30)
        for left in psutil.wait_procs(family, timeout=10)[1]:
            left.kill()
