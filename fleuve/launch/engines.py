"""The engines' processes: a run's workers, which come and go by name, and an evaluation's engine."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fleuve.config.settings import RolloutSettings, Settings
from fleuve.contracts import RolloutEngine, RolloutError
from fleuve.launch.broadcasting import BroadcastEngine, Broadcasts
from fleuve.launch.delivering import delivering
from fleuve.launch.elsewhere import Elsewhere
from fleuve.launch.host import LOCAL, Host, Process, stop_all
from fleuve.launch.kinds import KINDS, Client
from fleuve.launch.placement import Place
from fleuve.launch.process import ChildError, log_tail
from fleuve.types import WeightFile

UNKILLABLE = 10.0
"""Seconds after which a killed process that is still there is left to the system."""
REAPED = 0.2
"""Seconds for the news that a process has ended to follow the connections that it lost."""


@dataclass(frozen=True)
class _Running:
    child: Process
    client: Client
    engine: RolloutEngine
    """The client, as others use it."""


class EngineProcesses:
    """Implements `contracts.Supervisor`. `worker-0`, `worker-1`, … have the `places`, again and again; workers of other
    names float over all cores. Each writes to `logs/NAME.log`, a restarted one behind what it had written before."""

    def __init__(
        self,
        settings: Settings,
        logs: Path,
        weights: Path,
        places: Sequence[Place],
        host: Host = LOCAL,
        broadcasts: Broadcasts | None = None,
    ) -> None:
        self._settings = settings
        self._logs = logs
        self._weights = weights
        self._host = host
        self._broadcasts = broadcasts
        self._places = {f"worker-{index}": place for index, place in enumerate(places)}
        self._elsewhere = Place(cpus=None, threads=places[0].threads)
        self._running: dict[str, _Running] = {}

    @property
    def names(self) -> list[str]:
        """Of the workers that a run begins with."""
        return list(self._places)

    @property
    def clients(self) -> list[RolloutEngine]:
        """The workers that it began with, as they are now."""
        return [self._running[name].engine for name in self.names]

    @property
    def children(self) -> list[Process]:
        """Every process there is."""
        return [running.child for running in self._running.values()]

    async def open(self, worker: str) -> RolloutEngine:
        """Start `worker`, which must not be running.

        Raises:
            ChildError: it died, or did not answer within `rollout.start_timeout`.
            RolloutError: it is one of `rollout.urls`, and nobody answers there, or nobody who can be a worker.
        """
        rollout, place = self._settings.rollout, self._places.get(worker, self._elsewhere)
        child = (
            self._found(worker)
            if rollout.urls
            else await start_engine(
                worker,
                self._settings.model.path,
                rollout,
                self._logs / f"{worker}.log",
                threads=place.threads,
                cpus=place.cpus,
                weights=self._weights,
                host=self._host,
            )
        )
        request_timeout = rollout.request_timeout + self._settings.longest_pause
        kind, model = KINDS[rollout.engine], self._settings.model.path
        client = kind.client(worker, child.url, child.token, model, rollout, request_timeout)
        try:
            await client.__aenter__()
            engine = self._told(worker, client, child)
        except BaseException as error:
            await client.__aexit__()
            await child.stop(grace=0)
            if isinstance(child, Elsewhere) and (told := child.told(error)):
                raise told from error
            raise
        self._running[worker] = _Running(child, client, engine)
        return engine

    def _told(self, worker: str, client: Client, child: Process) -> RolloutEngine:
        """The client, with what has to happen before it is told to take weights.

        Raises:
            RolloutError: it cannot take them as this run's travel.
        """

        async def deliver(weights: WeightFile) -> None:
            await self._host.deliver(weights, child)

        if self._broadcasts is not None:
            if not client.seats:
                raise RolloutError(
                    f'{worker}: {child.url} takes no broadcasts (weights.transport = "broadcast"): its fleuve_vllm is '
                    "older than this"
                )
            return BroadcastEngine(worker, client, deliver, self._broadcasts)
        here = self._host is LOCAL or isinstance(child, Elsewhere)
        return client if here else delivering(client, deliver)

    def _found(self, worker: str) -> Process:
        """The server of `rollout.urls` that is `worker`.

        Raises:
            RolloutError: there is none.
        """
        named = dict(zip(self._places, self._settings.rollout.urls, strict=False))
        if worker not in named:
            raise RolloutError(f"{worker}: rollout.urls names no server for it")
        return Elsewhere(worker, named[worker].rstrip("/"), self._logs / f"{worker}.log")

    async def start(self, worker: str) -> RolloutEngine:
        """A fresh process under that name.

        Raises:
            RolloutError: it did not come up in time.
        """
        try:
            return await self.open(worker)
        except ChildError as error:
            first, *_, last = [*str(error).splitlines(), ""]
            raise RolloutError(f"{first} {last}".strip()) from error
        except OSError as error:
            raise RolloutError(f"{worker}: no process could be started: {error}") from error

    async def kill(self, worker: str) -> str:
        """End it at once; what it had come to."""
        running = self._running.pop(worker, None)
        if running is None:
            return "there was no process"
        child, alive = running.child, False
        if isinstance(child, Elsewhere):
            await running.client.__aexit__()
            return f"the server at {child.url} is not this run's to end"
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), REAPED)
            alive = child.alive
        finally:  # the run may end meanwhile, and nobody else knows of this process any more
            child.kill()
            await running.client.__aexit__()
        try:
            status = await asyncio.wait_for(child.stop(grace=0), UNKILLABLE)
        except TimeoutError:
            return f"process {child.pid} does not end, though killed: it waits for a device or a disk"
        if alive:
            return f"process {child.pid} was there and is killed"
        last = log_tail(child.log_path, 1) if status > 0 else ""
        return f"process {child.pid} had ended: {child.ending}" + (f" ({last.strip()})" if last else "")

    async def close(self, *others: Process) -> None:
        """End every process, and `others` beside them."""
        running, self._running = list(self._running.values()), {}
        await stop_all([*others, *(r.child for r in running)])
        for r in running:
            await r.client.__aexit__()


async def start_engine(
    name: str,
    model: str,
    rollout: RolloutSettings,
    log_path: Path,
    *,
    threads: int,
    cpus: Collection[int] | None = None,
    weights: Path | None = None,
    host: Host = LOCAL,
) -> Process:
    """An engine that serves `model`, once it answers. `weights` is the directory that it may read new ones from.

    Raises:
        ChildError: it died, or did not answer within `rollout.start_timeout`.
    """
    kind = KINDS[rollout.engine]
    options = kind.options(name, model, rollout, threads, weights)
    return await host.start(
        name,
        kind.module,
        options,
        log_path,
        cpus=cpus,
        threads=threads,
        start_timeout=kind.start_timeout(rollout),
    )
