"""A Ray cluster as the host of a run's processes: Ray says where, and this what runs there.

The run's own process (the controller) is the driver of the Ray job: all actors end with it. A process whose node sees
the run's weights directory reads from it; to the other nodes weights are brought over HTTP, once a node and version.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fleuve.config.settings import Settings
from fleuve.contracts import RolloutError
from fleuve.launch.background import in_background
from fleuve.launch.host import Process
from fleuve.launch.placement import Placement
from fleuve.launch.process import ChildError, LostAtStartError
from fleuve.launch.ray_actors import Failed, NodeActor, ProcessActor, Spot, Started
from fleuve.launch.ray_address import find_cluster
from fleuve.launch.ray_cluster import Need, NoPlaceError, Places, disconnect, has_gpus, join, start
from fleuve.launch.ray_head import watch_head
from fleuve.launch.ray_process import LogCopy, RayProcess
from fleuve.types import WeightFile

TRAINER = "trainer"
CREATED = 120.0
"""Seconds for an actor to be there once it has a place: a worker process of Ray starts and imports this."""
KEPT = 600.0
"""Seconds for which the place of a process that has ended is kept for the next of its name."""
MARGIN = 10.0
"""Seconds beyond the deadline of something that an actor does, for its reply to come."""


class RayHost:
    """Implements `host.Host`. `logs` is a directory of the run, `weights` the one that its weights are published in."""

    def __init__(self, settings: Settings, logs: Path, weights: Path) -> None:
        options = settings.launch.ray
        self._settings = settings
        self._weights = weights
        self._probes = [_Probe(weights), _Probe(logs)]
        self._places = Places(options.place_timeout, options.strategy == "spread")
        self._env = dict(line.split("=", 1) for line in options.env)
        self._home = ray.get_runtime_context().get_node_id()
        gpus = has_gpus()
        rollout = settings.rollout
        each = rollout.vllm.tensor_parallel if rollout.engine == "vllm" else 1
        self._worker_gpus = _share(options.worker_gpus, rollout.device, gpus) * (
            each if options.worker_gpus is None else 1
        )
        self._rank_gpus = _share(options.rank_gpus, settings.trainer.device, gpus)
        self._process_actor = ray.remote(ProcessActor)
        self._node_actor = ray.remote(NodeActor)
        self._nodes: dict[str, Any] = {}
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._trainer: Spot | None = None

    def reserve(self, placement: Placement) -> None:
        """Places for the processes that the run begins with: the trainer is asked for first."""
        self._reserve(TRAINER, placement.trainer.threads)
        for index, place in enumerate(placement.others):
            self._reserve(f"{TRAINER}-{index + 1}", place.threads)
        for index, place in enumerate(placement.workers):
            self._reserve(f"worker-{index}", place.threads)

    async def start(
        self,
        name: str,
        module: str,
        options: Mapping[str, Any],
        log_path: Path,
        *,
        cpus: Collection[int] | None = None,
        threads: int = 1,
        start_timeout: float = 180.0,
    ) -> Process:
        """See `host.Host`. `threads` is also what it takes of its node's CPUs; which of them, is not said."""
        actor = await self._place(name, threads, log_path)
        log = LogCopy(log_path)
        copying = asyncio.create_task(log.follow(actor))
        try:
            async with asyncio.timeout(CREATED):
                spot: Spot = await actor.spot.remote([probe.given for probe in self._probes])
            await self._prepare(name, spot, log_path)
            ports = self._settings.launch.ray.ports
            arguments = {"threads": threads, "start_timeout": start_timeout, "ports": ports}
            async with asyncio.timeout(start_timeout + MARGIN):
                started: Started | Failed = await actor.start.remote(name, module, options, spot.address, arguments)
                if isinstance(started, Failed):
                    await log.catch_up(actor)
            if isinstance(started, Failed):
                kind = LostAtStartError if started.lost else ChildError
                raise kind(name, f"on {spot.host} {started.what}", log_path)
        except (RayError, TimeoutError) as error:
            await self._forget(actor)
            self._places.give_up(name)
            reason = next(iter(reversed(str(error).strip().splitlines())), "it does not answer")
            raise LostAtStartError(name, f"could not be started by Ray: {reason.strip()}", log_path) from error
        except BaseException:
            await self._forget(actor)
            raise
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
        return RayProcess(name, actor, spot, started, log, lambda: self._has_ended(name, actor))

    async def deliver(self, weights: WeightFile, process: Process) -> None:
        """See `host.Host`."""
        if not isinstance(process, RayProcess):
            return  # a server that the user runs
        source, spot = self._trainer, process.spot
        if source is None or _share_files(source, spot):
            return
        timeout = self._settings.rollout.update_timeout
        try:
            async with asyncio.timeout(timeout + MARGIN):
                url, token = await self._node(source).serve.remote(source.address)
                brought: int | str = await self._node(spot).bring.remote(weights, url, token, timeout)
        except (RayError, TimeoutError) as error:
            for lost in (source, spot):  # whichever it was: the other is made anew as soon
                self._nodes.pop(lost.node, None)
            raise RolloutError(
                f"{process.name}: weights of version {weights.version} cannot be brought to {spot.host}: "
                f"{type(error).__name__}"
            ) from error
        if isinstance(brought, str):
            raise RolloutError(f"{process.name}: {brought}")

    async def close(self) -> None:
        """End what is left of it in the cluster."""
        for leaving in self._leaving.values():
            leaving.cancel()
        for probe in self._probes:
            probe.remove()
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(MARGIN):
                await asyncio.gather(*(node.close.remote() for node in self._nodes.values()), return_exceptions=True)
        for node in self._nodes.values():
            await self._forget(node)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MARGIN):
                await in_background(self._places.close)

    async def _place(self, name: str, threads: int, log_path: Path) -> Any:
        """An actor for it, on its way to its node."""
        if (leaving := self._leaving.pop(name, None)) is not None:
            leaving.cancel()
        need = self._need(name, threads)
        try:
            strategy = await self._places.strategy(name, need, self._near(name))
        except NoPlaceError as error:
            raise ChildError(name, str(error), log_path) from error
        env = self._env | ({} if need.gpus else {"CUDA_VISIBLE_DEVICES": ""})
        actor = self._process_actor.options(
            num_cpus=need.cpus, num_gpus=need.gpus, scheduling_strategy=strategy, max_restarts=0
        )
        return actor.remote(os.getcwd(), env)

    def _reserve(self, name: str, threads: int) -> None:
        self._places.reserve(name, self._need(name, threads), self._near(name))

    def _need(self, name: str, threads: int) -> Need:
        return Need(threads, self._rank_gpus if _trains(name) else self._worker_gpus)

    def _near(self, name: str) -> str | None:
        """The trainer is best where the run's own process is: they share files for sure. What of its ranks finds no
        place there goes where Ray packs it."""
        return self._home if _trains(name) else None

    async def _prepare(self, name: str, spot: Spot, log_path: Path) -> None:
        """Its node has what the process will look for."""
        sees_weights, sees_run = spot.sees
        if _trains(name):
            if not sees_run:
                where = f"{spot.host}, which does not see {self._settings.run_dir}"
                raise ChildError(
                    name,
                    f"is placed on {where}: checkpoints need a run_dir on a file system that all nodes share, or a "
                    "trainer on the node that the run was started on",
                    log_path,
                )
            if name == TRAINER:
                self._trainer = spot
        if not sees_weights:
            self._node(spot)

    def _node(self, spot: Spot) -> Any:
        """The actor that keeps the node's weights directory."""
        if spot.node not in self._nodes:
            self._nodes[spot.node] = self._node_actor.options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=spot.node, soft=False),
            ).remote(str(self._weights))
        return self._nodes[spot.node]

    async def _has_ended(self, name: str, actor: Any) -> None:
        """Nothing is left of it. Whether another of its name will be started, nobody says."""
        await self._forget(actor)
        if (earlier := self._leaving.pop(name, None)) is not None:
            earlier.cancel()
        self._leaving[name] = asyncio.get_running_loop().call_later(KEPT, self._give_up, name)

    def _give_up(self, name: str) -> None:
        # Not in this thread: it asks the head node, which may be slow or gone.
        threading.Thread(target=self._places.give_up, args=(name,), daemon=True).start()

    async def _forget(self, actor: Any) -> None:
        with contextlib.suppress(RayError, ValueError, TimeoutError):
            async with asyncio.timeout(MARGIN):  # it asks the head
                await in_background(lambda: ray.kill(actor))


class _Probe:
    """A small file by which a node tells whether it sees a directory of this one."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory.absolute() / f".seen-{secrets.token_hex(8)}"
        self._content = secrets.token_bytes(16)
        self._path.write_bytes(self._content)

    @property
    def given(self) -> tuple[str, bytes]:
        return str(self._path), self._content

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _share_files(one: Spot, other: Spot) -> bool:
    """Whether what one publishes in the weights directory is there for the other."""
    return one.node == other.node or (one.sees[0] and other.sees[0])


def _trains(name: str) -> bool:
    """Whether it is a rank of the trainer: `trainer`, `trainer-1`, …"""
    return name == TRAINER or name.startswith(f"{TRAINER}-")


def _share(given: int | None, device: str, gpus: bool) -> int:
    if given is not None:
        return given
    return 1 if device == "cuda" or (device == "auto" and gpus) else 0


@asynccontextmanager
async def open_ray_host(
    settings: Settings, logs: Path, weights: Path, placement: Placement
) -> AsyncIterator[tuple[RayHost, str]]:
    """The cluster, with a line about it, and places in it on their way.

    Raises:
        NoClusterError: there is no such cluster, or none can be started.
    """
    found = await in_background(lambda: find_cluster(settings.launch.ray))
    if found:
        join(settings.launch.ray)
    else:
        start(sum(place.threads for place in (placement.trainer, *placement.others, *placement.workers)))
    try:
        host = RayHost(settings, logs, weights)
        nodes = len({node["NodeID"] for node in ray.nodes() if node["Alive"]})
        about = (
            f"a Ray cluster of {nodes} node" + "s" * (nodes > 1)
            if found
            else "a Ray cluster of this machine alone is started"
        )
        try:
            async with asyncio.TaskGroup() as tasks:  # without a head nothing of all this goes on
                watching = tasks.create_task(watch_head())
                await in_background(lambda: host.reserve(placement))
                yield host, about
                watching.cancel()
        finally:
            await host.close()
    finally:
        disconnect()
