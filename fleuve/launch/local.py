"""All processes of a run on this machine: one trainer, `rollout.workers` engines, each on its cores."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fleuve.config.settings import Settings
from fleuve.launch.engines import start_engine
from fleuve.launch.placement import available_cpus, place
from fleuve.launch.process import ChildProcess, stop_all
from fleuve.rollout.client import EngineClient
from fleuve.train.client import TrainerClient
from fleuve.weights.directory import make_directory


@dataclass(frozen=True)
class System:
    """The running processes, as the controller talks to them."""

    trainer: TrainerClient
    engines: list[EngineClient]
    children: list[ChildProcess]

    async def watch(self) -> None:
        """Returns never; raises as soon as a child dies.

        Raises:
            ExceptionGroup: of the ChildError that names the process and ends with its last words.
        """
        async with asyncio.TaskGroup() as tasks:
            for child in self.children:
                tasks.create_task(_raise_when_dead(child))


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
        starting = [
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
            )
        ]
        for index, spot in enumerate(places.workers):
            name = f"worker-{index}"
            starting.append(
                asyncio.create_task(
                    start_engine(
                        name,
                        settings.model.path,
                        rollout,
                        logs / f"{name}.log",
                        threads=spot.threads,
                        cpus=spot.cpus,
                        weights=weights,
                    )
                )
            )
        children = await _all_or_none(starting)
        stack.push_async_callback(stop_all, children)
        trainer = await stack.enter_async_context(
            TrainerClient(children[0].url, settings.trainer.step_timeout, children[0].token)
        )
        request_timeout = rollout.request_timeout + settings.longest_pause
        engines = [
            await stack.enter_async_context(
                EngineClient(child.name, child.url, request_timeout, rollout.update_timeout, child.token)
            )
            for child in children[1:]
        ]
        yield System(trainer, engines, children)


async def _all_or_none(starting: list[asyncio.Task[ChildProcess]]) -> list[ChildProcess]:
    """The children once all are up; if one fails, those that are up are stopped before the error goes on."""
    try:
        return await asyncio.gather(*starting)
    except BaseException:
        for task in starting:
            task.cancel()
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(outcome, ChildProcess):
                await outcome.stop()
        raise


async def _raise_when_dead(child: ChildProcess) -> None:
    raise await child.died()
