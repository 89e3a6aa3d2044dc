"""All processes of a run: one trainer, `rollout.workers` engines, on this machine each on its cores."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fleuve.config.settings import RolloutSettings, Settings
from fleuve.control.fleet import FleetPolicy
from fleuve.control.health import HealthPolicy
from fleuve.launch.broadcasting import Broadcasts
from fleuve.launch.engines import EngineProcesses
from fleuve.launch.history import History
from fleuve.launch.host import LOCAL, Host, Process, open_host
from fleuve.launch.placement import Place, Placement, available_cpus, place, place_anywhere
from fleuve.launch.ranks import start_ranks
from fleuve.launch.starting import twice
from fleuve.launch.trainer import SupervisedTrainer
from fleuve.weights.directory import make_directory


@dataclass(frozen=True)
class System:
    """The running processes, as the controller talks to them."""

    trainer: SupervisedTrainer
    engines: EngineProcesses
    broadcasts: Broadcasts | None
    start_trainer: Callable[[Settings], Awaitable[Process]]
    """Starts a trainer by other settings, in the place of the one there is."""

    @property
    def children(self) -> list[Process]:
        """Every process, as of now."""
        return [*([self.trainer.process] if self.trainer.process else []), *self.engines.children]


@asynccontextmanager
async def start(
    settings: Settings, logs: Path, history: History, note: Callable[[str], None], trainer_settings: Settings
) -> AsyncIterator[System]:
    """Start the trainer (by `trainer_settings`) and the engines side by side, and end them all on the way out, however
    that is reached. `note` hears of a trainer that is started again.

    Raises:
        ChildError: one did not come up.
        UserError: there is no such cluster as the settings name.
    """
    places = _places(settings)
    weights = make_directory(settings.weights.parent).resolve()
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, weights, ignore_errors=True)
        host = await stack.enter_async_context(open_host(settings, logs, weights, places, note))
        trainer = SupervisedTrainer(
            lambda: start_trainer(trainer_settings, logs, weights, _places(trainer_settings).ranks, host),
            history,
            note,
            step_timeout=settings.trainer.step_timeout,
            health_timeout=settings.trainer.health_timeout,
        )
        broadcasts: Broadcasts | None = None
        if settings.weights.transport == "broadcast":
            broadcasts = Broadcasts(trainer, settings.weights.broadcast_timeout, note)
            stack.push_async_callback(broadcasts.close)
        engines = EngineProcesses(settings, logs, weights, places.workers, host, broadcasts)
        stack.push_async_callback(engines.close)
        starting = [asyncio.create_task(twice(partial(engines.open, name), note)) for name in engines.names]

        async def close() -> None:
            await asyncio.gather(engines.close(), trainer.close())

        stack.push_async_callback(close)
        await _all_or_none([asyncio.create_task(twice(trainer.open, note)), *starting])

        def started(new: Settings) -> Awaitable[Process]:
            return start_trainer(new, logs, weights, _places(new).ranks, host)

        yield System(trainer, engines, broadcasts, started)


def _places(settings: Settings) -> Placement:
    workers, worker_threads = settings.rollout.workers, settings.rollout.threads
    threads, ranks = settings.trainer.threads, settings.trainer.ranks
    if settings.launch.backend != "local":
        return place_anywhere(workers, worker_threads, threads, ranks)
    return place(settings.launch.placement, available_cpus(), workers, worker_threads, threads, ranks)


async def start_trainer(
    settings: Settings, logs: Path, weights: Path, spots: Sequence[Place], host: Host = LOCAL
) -> Process:
    """A trainer's process, once it answers, or one for each rank; it publishes in the directory `weights`.

    Raises:
        ChildError: it did not come up.
    """
    options = {"settings": settings.model_dump(mode="json"), "weights_directory": str(weights)}
    if settings.trainer.sharded:
        return await start_ranks(settings, options, logs, spots, host)
    (spot,) = spots
    return await host.start(
        "trainer",
        "fleuve.train",
        {**options, "threads": spot.threads},
        logs / "trainer.log",
        cpus=spot.cpus,
        threads=spot.threads,
        start_timeout=settings.trainer.start_timeout,
    )


def fleet_policy(rollout: RolloutSettings) -> FleetPolicy:
    """How the workers are judged: one that answers none of four probes in a row is dead."""
    health = HealthPolicy(patience=rollout.health_timeout / 4, misses=4)
    one_version = rollout.interrupt == "finish"
    return FleetPolicy(health, rollout.no_worker_timeout, one_version=one_version)


async def _all_or_none(starting: Sequence[asyncio.Task[Any]]) -> None:
    """Returns once all are up; if one fails, no other is on its way any more when the error goes on."""
    try:
        await asyncio.gather(*starting)
    except BaseException:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        raise
