"""The same checks on every node of a Ray cluster, and those that only a cluster needs. Imports ray."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fleuve.config.settings import Settings
from fleuve.doctor.facts import NodeFacts, Request, gather
from fleuve.doctor.needs import Needs
from fleuve.doctor.verdicts import Finding, judge, niceness, ray_token, sees, skew
from fleuve.launch.ray_address import NoClusterError, find_cluster
from fleuve.launch.ray_cluster import disconnect, join, living_nodes
from fleuve.weights.directory import shared_memory

ANSWER = 60.0
"""Seconds for a node to run something small."""
PROBES = 3
"""Probes of a node, one after the other, each with its deadline."""
TOKEN = Path.home() / ".ray" / "auth_token"


def examine_cluster(
    settings: Settings, request: Request, needs: Needs, tell: Callable[[str], None]
) -> list[tuple[str, Finding]]:
    """Findings by node; this machine's own are not repeated."""
    here = os.uname().nodename
    try:
        if not find_cluster(settings.launch.ray):
            return [(here, Finding("Ray cluster", "none here: a run starts one of this machine alone"))]
        join(settings.launch.ray)
    except NoClusterError as error:
        return [(here, Finding("Ray cluster", error.found, "fail", error.advice))]
    try:
        nodes = living_nodes()
        tell(f"looking at the {len(nodes)} nodes of the cluster")
        home = ray.get_runtime_context().get_node_id()
        found = [(here, Finding("Ray cluster", _resources(nodes))), (here, _token())]
        with _Probe(Path(settings.run_dir)) as run, _Probe(Path(request.weights or shared_memory())) as weights:
            asked = [(node, _ask(node["NodeID"], request, [run.given, weights.given])) for node in nodes]
            for node, answer in asked:
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                found += [(name, f) for f in _findings(node, answer, request, needs, node["NodeID"] == home)]
        return found
    finally:
        disconnect()


def _findings(node: Any, answer: Any, request: Request, needs: Needs, home: bool) -> list[Finding]:
    try:
        facts, seen = ray.get(answer, timeout=ANSWER + PROBES * request.deadline)
        difference = _skew(node["NodeID"])
    except RayError as error:  # GetTimeoutError is one, too
        words = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        return [Finding("node", words, "fail", "is fleuve installed there, in the same version?")]
    beside = [niceness(facts.niceness), skew(*difference), sees(*seen)]
    return beside if home else judge(facts, needs) + beside


def _ask(node: str, request: Request, probes: Sequence[tuple[str, bytes]]) -> Any:
    return ray.remote(_look).options(num_cpus=0, max_retries=0, scheduling_strategy=_on(node)).remote(request, probes)


def _look(request: Request, probes: Sequence[tuple[str, bytes]]) -> tuple[NodeFacts, list[bool]]:
    return gather(request), [_reads(path, content) for path, content in probes]


def _wall() -> float:
    return time.time()


def _skew(node: str) -> tuple[float, float]:
    """How far the node's clock is ahead of this one's, and half the time that asking took: the best of some tries."""
    clock = ray.remote(_wall).options(num_cpus=0, scheduling_strategy=_on(node))
    best = (0.0, float("inf"))
    for _ in range(5):
        before = time.time()
        there = ray.get(clock.remote(), timeout=ANSWER)
        after = time.time()
        best = min(best, (there - (before + after) / 2, (after - before) / 2), key=lambda pair: pair[1])
    return best


def _on(node: str) -> Any:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _resources(nodes: Sequence[Any]) -> str:
    cpus, gpus = (sum(node["Resources"].get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    return f"{len(nodes)} nodes, {cpus:g} CPU and {gpus:g} GPU in all"


def _token() -> Finding:
    given = bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"))
    mode = TOKEN.stat().st_mode & 0o777 if not given and TOKEN.exists() else None
    return ray_token(mode, os.environ.get("RAY_AUTH_MODE", "").lower() == "token")


class _Probe:
    """A small file by which a node tells whether it sees a directory of this one."""

    def __init__(self, directory: Path) -> None:
        directory = directory.absolute()
        self._directory = next(d for d in (directory, *directory.parents) if d.is_dir())
        self._path = self._directory / f".fleuve-doctor-{secrets.token_hex(8)}"
        self.given = (str(self._path), secrets.token_bytes(16))

    def __enter__(self) -> _Probe:
        self._path.write_bytes(self.given[1])
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)


def _reads(path: str, content: bytes) -> bool:
    try:
        return Path(path).read_bytes() == content
    except OSError:
        return False
