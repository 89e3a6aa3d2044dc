"""Ray's cluster as the run uses it: connecting to it, and places for actors, by placement groups."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fleuve.config.launching import RaySettings
from fleuve.launch.background import in_background
from fleuve.launch.ray_address import NoClusterError, named
from fleuve.launch.ray_head import time_to_end

LONGEST = 500
"""Letters of what Ray says that are passed on."""
LEAVING = 15.0
"""Seconds for a cluster to be left, which asks its head; where it was started here, its processes end in them."""


@dataclass(frozen=True)
class Need:
    """What one process takes, all of it on one node."""

    cpus: int
    gpus: int

    def bundle(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def __str__(self) -> str:
        return f"{self.cpus} CPU" + (f" and {self.gpus} GPU" if self.gpus else "")


def join(settings: RaySettings) -> None:
    """Connect to the cluster that `ray_address.find_cluster` found. Call it in the main thread.

    Raises:
        NoClusterError: it cannot be joined: it is of another version of Ray or of Python, say.
    """
    name, given = named(settings)
    with time_to_end():
        _init(f"{name} = {given}: Ray does not join it", "`ray status` there says more", address=settings.address)


def start(cpus: int) -> None:
    """A cluster of this machine alone, which ends with this process. Call it in the main thread: what Ray starts ends
    with the thread that did. It has `cpus` to give, however many cores there are: its processes share them.

    Raises:
        NoClusterError: it does not start.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: far behind all else on this machine
    top = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    logs = Path(top, "ray", "session_latest", "logs")
    _init(
        "Ray does not start a cluster on this machine",
        f"try again if the machine was busy; the logs in {logs} say more",
        address="local",
        num_cpus=max(cpus, os.cpu_count() or 1),
        include_dashboard=False,
    )


def _init(failure: str, advice: str, **arguments: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    former = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
    except Exception as error:
        if not _is_rays(error):
            raise
        raise NoClusterError(f"{failure}: {_line(error)}", advice) from None
    finally:
        signal.signal(signal.SIGTERM, former)  # ray.init puts in its own, which would end this process unsaved


def _is_rays(error: Exception) -> bool:
    """Whether it says that there is no cluster to be had. Of its own kinds Ray raises few here: a process of the node
    that is not there in time is a plain `Exception`; a GCS that does not start or is not reached, and another version,
    a `RuntimeError`; arguments that do not fit the machine, a `ValueError`; a full or closed disk, an `OSError`."""
    return type(error) is Exception or isinstance(error, (RayError, RuntimeError, ValueError, OSError))


def disconnect() -> None:
    """Leave the cluster, which ends what this process has running there; or end it, where it was started here. A head
    that hangs is told goodbye, and not waited for."""
    former = signal.getsignal(signal.SIGTERM)
    leaving = threading.Thread(target=ray.shutdown, name="leaving Ray", daemon=True)
    leaving.start()
    leaving.join(LEAVING)
    if leaving.is_alive():
        atexit.unregister(ray.shutdown)  # it would wait again
    signal.signal(signal.SIGTERM, former)


def has_gpus() -> bool:
    """Whether any node of the cluster has."""
    return any(node["Resources"].get("GPU", 0) for node in living_nodes())


def living_nodes() -> list[Mapping[str, Any]]:
    """As Ray lists them."""
    return [node for node in ray.nodes() if node["Alive"]]


class NoPlaceError(RuntimeError):
    """The cluster has no place for a process, now. One line."""


class Places:
    """A placement group for each process that asks. It stays reserved while a process is started again, until its node
    is lost or it is given up: then Ray finds another. `spread` lets workers prefer the node with the fewest of them."""

    def __init__(self, timeout: float, spread: bool) -> None:
        self._timeout = timeout
        self._spread = spread
        self._groups: dict[str, PlacementGroup] = {}
        self._wishes: dict[str, str | None] = {}

    def reserve(self, name: str, need: Need, near: str | None = None) -> PlacementGroup:
        """Ask for a place for process `name`, or for another if the node that it has is lost; `near` is the node that
        is best, by its id. Ray answers in the order of asking."""
        if (group := self._groups.get(name)) is not None:
            if _lives(group):
                return group
            self.give_up(name)
        target = near if near is not None or not self._spread else self._emptiest()
        # The target is a wish: where it does not fit there, Ray takes another node.
        group = placement_group([need.bundle()], strategy="STRICT_PACK", _soft_target_node_id=target)
        self._groups[name], self._wishes[name] = group, target
        return group

    async def strategy(self, name: str, need: Need, near: str | None = None) -> PlacementGroupSchedulingStrategy:
        """Where the actor of process `name` goes.

        Raises:
            NoPlaceError: nowhere, within the timeout.
        """
        group = await in_background(lambda: self.reserve(name, need, near))
        if not await in_background(lambda: group.wait(self._timeout)):
            self.give_up(name)
            words = await in_background(_free)
            raise NoPlaceError(f"has no place after {self._timeout:g} s: it needs {need} on one node; free: {words}")
        return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)

    def give_up(self, name: str) -> None:
        """The place of process `name` is free for others, if there is still a cluster."""
        group = self._groups.pop(name, None)
        if group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    def close(self) -> None:
        """All of them."""
        for name in list(self._groups):
            self.give_up(name)

    def _emptiest(self) -> str | None:
        """The living node with the fewest processes of ours, as far as is known."""
        taken = Counter(_node_of(group) or self._wishes[name] for name, group in self._groups.items())
        return min((node["NodeID"] for node in living_nodes()), key=lambda node: taken[node], default=None)


def _node_of(group: PlacementGroup) -> str | None:
    """The node it is on, or was; None before it has one."""
    node: str | None = placement_group_table(group).get("bundles_to_node_id", {}).get(0)
    return node or None


def _lives(group: PlacementGroup) -> bool:
    """Whether it waits for a node, or has one that lives."""
    node = _node_of(group)
    return node is None or any(n["NodeID"] == node for n in living_nodes())


def _free() -> str:
    """What the nodes have left, for people."""
    left = ray._private.state.available_resources_per_node()
    words = [
        f"{free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU on {node['NodeManagerHostname']}"
        for node in living_nodes()
        if (free := left.get(node["NodeID"], {})) is not None
    ]
    return "; ".join(words) or "none, as there is no node"


def _line(error: Exception) -> str:
    """What it says, on one line."""
    words = shorten(str(error).partition("Last connection error")[0], LONGEST, placeholder=" …")
    return words.rstrip(" .") or type(error).__name__
