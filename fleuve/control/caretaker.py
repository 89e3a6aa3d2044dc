"""Brings the fleet's dead back: one task a worker that probes it while it lives, and kills, restarts and resyncs it
when it does not; and one that watches over there being any worker at all."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from fleuve.contracts import RolloutError, RunError, Supervisor
from fleuve.control.health import Health
from fleuve.control.worker import REMOVED, Life, Worker
from fleuve.types import WeightFile

if TYPE_CHECKING:
    from fleuve.control.fleet import Fleet


class Caretaker:
    """Without a supervisor it only watches over there being a worker: nobody is probed, nobody comes back."""

    def __init__(self, fleet: Fleet, supervisor: Supervisor | None) -> None:
        self._fleet = fleet
        self._supervisor = supervisor
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Never returns; see `Fleet.tend`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    for worker in list(self._fleet.workers.values()):
                        self.take_on(worker)
                    await self._watch_over_the_last()
                finally:
                    self._tasks = None  # at once: a group that is ending takes nobody more in
        finally:
            await self._fleet.stop_probing()

    @property
    def can_start(self) -> bool:
        """Whether there is a supervisor."""
        return self._supervisor is not None

    def take_on(self, worker: Worker) -> None:
        """Look after `worker` too; before `run`, that happens at its start, and once it ends, nobody is."""
        if self._tasks is not None and self._supervisor is not None:
            self._tasks.create_task(self._tend(worker, self._supervisor))

    async def _tend(self, worker: Worker, supervisor: Supervisor) -> None:
        """One worker, until it has left."""
        fleet, health = self._fleet, worker.health
        while True:
            if worker.leaving and not self._busy(worker):
                await self._part_with(worker, supervisor)
                return
            match health.state:
                case Health.DEAD:
                    await self._bring_back(worker, supervisor)
                case Health.STARTING:
                    await self._start(worker, supervisor)
                case _:
                    await self._nap(worker)
                    if health.living:
                        await asyncio.shield(fleet.probe(worker))
                    if worker.life is not None:
                        await fleet.collect(worker.life)

    def _busy(self, worker: Worker) -> bool:
        """Whether a group is on it, or anything waits for its answer."""
        life = worker.life
        return life is not None and (life.calls > 0 or self._fleet.router.busy(life))

    async def _nap(self, worker: Worker) -> None:
        """Until the next probe is due, or there is something else to do."""
        life = worker.life
        with suppress(TimeoutError):
            async with asyncio.timeout(self._fleet.policy.health.probe_every):
                await self._fleet.changed.until(lambda: worker.life is not life)

    async def _bring_back(self, worker: Worker, supervisor: Supervisor) -> None:
        """Dead → starting, once nothing is left of the process and the back-off is over."""
        fleet = self._fleet
        found = await supervisor.kill(worker.name)
        wait = max(worker.health.restart_at - fleet.now(), 0.0)
        fleet.note(f"{worker.name}: {found}; it is started again" + (f" in {wait:.0f} s" if wait else ""))
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await fleet.changed.until(lambda: worker.leaving)
        if not worker.leaving:
            worker.health.start(max(fleet.now(), worker.health.restart_at))
            fleet.restarts += 1

    async def _start(self, worker: Worker, supervisor: Supervisor) -> None:
        """Starting → resyncing → healthy; or dead."""
        fleet = self._fleet
        fleet.settle(worker)
        try:
            engine = await supervisor.start(worker.name)
        except RolloutError as error:
            worker.why = str(error)
            worker.health.lost(fleet.now())
            fleet.note(f"{worker.name} did not start: {error}")
            fleet.settle(worker)
            return
        worker.health.started()
        worker.life = life = Life(worker.name, engine, fleet.initial_version)
        fleet.settle(worker)
        async with asyncio.TaskGroup() as tasks:
            probing = tasks.create_task(self._keep_probing(worker))
            try:
                await self._resync(life)
            except RolloutError as error:
                fleet.lose(life, f"it does not take up the weights: {error}")
            else:
                fleet.join(worker, life)
            probing.cancel()

    async def _keep_probing(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._fleet.policy.health.probe_every)
            await asyncio.shield(self._fleet.probe(worker))

    async def _resync(self, life: Life) -> None:
        """Bring `life` to where the others are. They may go on meanwhile, so look again after each wait.

        Raises:
            RolloutError: it does not follow.
        """
        fleet, paused = self._fleet, False
        while True:
            if fleet.weights is not None and fleet.weights.version != life.version:
                await self._take_up(life, fleet.weights)
            elif fleet.paused != paused:
                paused = fleet.paused
                await life.call(lambda engine: engine.pause() if fleet.paused else engine.resume())
            else:
                return

    async def _take_up(self, life: Life, weights: WeightFile) -> None:
        await life.call(lambda engine: engine.update_weights(weights, "recompute"))
        life.version = weights.version

    async def _part_with(self, worker: Worker, supervisor: Supervisor) -> None:
        fleet = self._fleet
        if worker.life is not None:
            fleet.lose(worker.life, REMOVED)
        await supervisor.kill(worker.name)
        del fleet.workers[worker.name]
        fleet.note(f"{worker.name} has left")
        fleet.changed.notify()

    async def _watch_over_the_last(self) -> None:
        """
        Raises:
            RunError: see `Fleet.tend`.
        """
        fleet = self._fleet
        while True:
            await fleet.changed.until(lambda: not fleet.lives())
            if self._supervisor is None:
                raise RunError(f"no rollout worker is left: {self._last_words()}")
            limit = fleet.policy.no_worker_timeout
            fleet.note(f"no rollout worker is left: waiting up to {limit:g} s for one to come back")
            fleet.activity("none is left; waiting for one to come back")
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await fleet.changed.until(lambda: bool(fleet.lives()))
            if not fleet.lives():  # there may be one at the very last moment
                raise RunError(f"no rollout worker for {limit:g} s: {self._last_words()}")
            fleet.activity(f"generating with version {fleet.newest_version}")

    def _last_words(self) -> str:
        return "; ".join(f"{worker.name}: {worker.why}" for worker in self._fleet.workers.values())
