"""All processes of a run on this machine: one trainer, `rollout.workers` engines, each on its cores."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fleuve.config.settings import RolloutSettings, Settings
from fleuve.control.fleet import FleetPolicy
from fleuve.control.health import HealthPolicy
from fleuve.launch.engines import EngineProcesses
from fleuve.launch.placement import available_cpus, place
from fleuve.launch.process import ChildProcess
from fleuve.rollout.client import EngineClient
from fleuve.train.client import TrainerClient
from fleuve.weights.directory import make_directory


@dataclass(frozen=True)
class System:
    """The running processes, as the controller talks to them."""

    trainer: TrainerClient
    trainer_process: ChildProcess
    engines: EngineProcesses

    @property
    def children(self) -> list[ChildProcess]:
        """Every process, as of now."""
        return [self.trainer_process, *self.engines.children]

    async def watch(self) -> None:
        """Returns never; raises as soon as the trainer dies. The engines are the fleet's to look after.

        Raises:
            ChildError: it names the process and ends with its last words.
        """
        raise await self.trainer_process.died()


@asynccontextmanager
async def start(settings: Settings, logs: Path) -> AsyncIterator[System]:
    """Start the trainer and the engines side by side, and end them all on the way out, however that is reached.

    Raises:
        ChildError: one did not come up.
    """
    rollout = settings.rollout
    places = place(
        settings.launch.placement,
        available_cpus(),
        rollout.workers,
        rollout.threads,
        settings.trainer.threads,
    )
    weights = make_directory(settings.weights.path if settings.weights.transport == "path" else None)
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, weights, ignore_errors=True)
        engines = EngineProcesses(settings, logs, weights, places.workers)
        stack.push_async_callback(engines.close)
        starting = [asyncio.create_task(engines.open(name)) for name in engines.names]
        trainer_process = await _all_or_none(
            asyncio.create_task(
                ChildProcess.start(
                    "trainer",
                    "fleuve.train",
                    {
                        "settings": settings.model_dump(mode="json"),
                        "weights_directory": str(weights),
                        "threads": places.trainer.threads,
                    },
                    logs / "trainer.log",
                    cpus=places.trainer.cpus,
                    threads=places.trainer.threads,
                    start_timeout=settings.trainer.start_timeout,
                )
            ),
            starting,
        )
        stack.push_async_callback(engines.close, trainer_process)
        trainer = await stack.enter_async_context(
            TrainerClient(trainer_process.url, settings.trainer.step_timeout, trainer_process.token)
        )
        yield System(trainer, trainer_process, engines)


def fleet_policy(rollout: RolloutSettings) -> FleetPolicy:
    """How the workers are judged: one that answers none of four probes in a row is dead."""
    health = HealthPolicy(patience=rollout.health_timeout / 4, misses=4)
    one_version = rollout.interrupt == "finish"
    return FleetPolicy(health, rollout.no_worker_timeout, one_version=one_version)


async def _all_or_none(trainer: asyncio.Task[ChildProcess], engines: list[asyncio.Task[EngineClient]]) -> ChildProcess:
    """The trainer's process once all are up; if one fails, no other is on its way any more when the error goes on."""
    try:
        await asyncio.gather(trainer, *engines)
    except BaseException:
        for task in (trainer, *engines):
            task.cancel()
        await asyncio.gather(trainer, *engines, return_exceptions=True)
        if not trainer.cancelled() and trainer.exception() is None:
            await trainer.result().stop()
        raise
    return trainer.result()
