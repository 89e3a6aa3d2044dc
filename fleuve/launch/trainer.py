"""The trainer's process, started again when it dies or hangs, and brought to where it was."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fleuve.contracts import TrainerError, TrainerLostError
from fleuve.launch.background import in_background
from fleuve.launch.history import History, Reading
from fleuve.launch.host import Process
from fleuve.launch.process import ChildError
from fleuve.train.client import TrainerClient
from fleuve.types import Batch, StepResult, WeightFile
from fleuve.weights.invitation import Call, Hall, Loss

T = TypeVar("T")

Start = Callable[[], Awaitable[Process]]
Made = Callable[[Batch, StepResult], None]
"""Told of a step that is made once more, each time that it is."""


def _untold(batch: Batch, result: StepResult) -> None: ...


IDLE_LOOK = 0.2
"""Seconds between two looks at a process of which nothing is asked."""

LAST_WORDS = 1.0
"""Seconds for which a lost connection waits for the news that the process behind it died."""

LOSSES = 3
"""Processes lost in a row, no step made in between, after which the run ends."""


@dataclass(eq=False)
class _Life:
    """One process, and the connections to it."""

    process: Process
    client: TrainerClient


class SupervisedTrainer:
    """Implements `contracts.Trainer`. What a call asks of a process that dies is asked of the next one, after that has
    loaded the last checkpoint and made the steps since once more: the same batches give the same weights.

    A trainer that answers with an error is another matter: it lives, and the error goes on to the caller.
    """

    def __init__(
        self,
        start: Start,
        history: History,
        note: Callable[[str], None],
        *,
        step_timeout: float,
        health_timeout: float,
    ) -> None:
        self.version = 0
        """How many steps the trainer has made, or has to make again before it goes on."""
        self.restarts = 0
        self._start = start
        self._history = history
        self._note = note
        self._step_timeout = step_timeout
        self._health_timeout = health_timeout
        self._life: _Life | None = None
        self._mending = asyncio.Lock()
        self._recovery: asyncio.Task[_Life] | None = None
        self._losses = 0
        self._served: int | None = None  # as of the last publication
        self._cut = False

    # --- its life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the first process.

        Raises:
            ChildError: it did not come up.
        """
        self._life = await self._begin()

    async def bring_up(self, past: Reading, made: Made) -> None:
        """Make the first process what the trainer was at the end of `past`; one that dies over it is replaced as at any
        other time. `past` must be all that the history holds.

        Raises:
            TrainerError: it cannot be brought there, or failed.
            UserError: the checkpoint is another model's.
        """
        life = self._life
        assert life is not None
        try:
            await self._follow(life, past, made)
            self.version = past.version
        except TrainerLostError as error:
            why = await _last_words(life.process) or str(error)
            await in_background(past.read_to_the_end)  # where the caller goes on
            self.version = past.version
            await self._recover(life, why, made)

    async def change(self, start: Start) -> None:
        """Replace the process by one that `start` starts, which goes on from the last checkpoint."""
        self._start = start
        await self.close()
        self._life = life = await self._begin()
        await self._catch_up(life)

    async def close(self) -> None:
        """End the process."""
        life, self._life = self._life, None
        if life is not None:
            await _end(life, grace=5.0)

    async def tend(self) -> None:
        """Returns never: sees to it that a process which dies while nothing is asked of it is replaced at once.

        Raises:
            TrainerError: it cannot be brought back.
        """
        while True:
            life = self._life
            if life is not None and not life.process.alive:
                await self._recover(life, str(await life.process.died()))
            await asyncio.sleep(IDLE_LOOK)

    @property
    def process(self) -> Process | None:
        """The process of this moment; None between two."""
        return None if self._life is None else self._life.process

    @property
    def alive(self) -> bool:
        """Whether there is a process that can be asked."""
        return self._life is not None and self._life.process.alive

    def gauges(self) -> dict[str, float]:
        """For the metrics."""
        return {"trainer/restarts": float(self.restarts)}

    # --- contracts.Trainer ------------------------------------------------------------------------------------------

    async def step(self, batch: Batch) -> StepResult:
        """See the contract. Nothing is trained if it is interrupted while the trainer is being brought back."""
        self._cut = False
        try:
            result = await self._ask(lambda client: client.step(batch))
        except asyncio.CancelledError:
            if not self._cut:
                raise
            nothing: list[list[float | None]] = [[None for _ in group.trajectories] for group in batch.groups]
            return StepResult(version=self.version, metrics={}, advantages=nothing, trained=[])
        self.version = result.version
        self._losses = 0
        return result

    async def interrupt(self) -> None:
        if self._recovery is not None:
            self._cut = True
            self._recovery.cancel()
        elif self._life is not None:
            await self._life.client.interrupt()

    async def publish(self, served: int | None = None) -> WeightFile:
        self._served = served if served is not None else 0
        return await self._ask(lambda client: client.publish(served))

    async def save(self, path: Path) -> None:
        await self._ask(lambda client: client.save(path))

    async def load(self, path: Path) -> None:
        await self._ask(lambda client: client.load(path))

    # --- broadcasting.Sending: asked of the process that there is; another one would not know what is meant -----------

    async def hall(self) -> Hall:
        return await self._now.hall()

    async def broadcast(self, call: Call) -> None:
        await self._now.broadcast(call)

    async def lose(self, loss: Loss) -> None:
        await self._now.lose(loss)

    # --- the parts --------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> TrainerClient:
        if self._life is None:
            raise TrainerLostError("the trainer is being started again, or has ended")
        return self._life.client

    async def _ask(self, what: Callable[[TrainerClient], Awaitable[T]]) -> T:
        while True:
            async with self._mending:
                life = self._life
            if life is None:
                raise TrainerError("the trainer has ended")
            try:
                return await self._watched(life, what)
            except TrainerLostError as error:
                await self._recover(life, await _last_words(life.process) or str(error))

    async def _watched(self, life: _Life, what: Callable[[TrainerClient], Awaitable[T]]) -> T:
        """What a call returns, unless the process dies or falls silent first."""
        call = asyncio.ensure_future(what(life.client))
        end = asyncio.ensure_future(self._end_of(life))
        try:
            await asyncio.wait({call, end}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise TrainerLostError(end.result())
            return call.result()
        finally:
            for task in (call, end):
                task.cancel()
            await asyncio.gather(call, end, return_exceptions=True)

    async def _end_of(self, life: _Life) -> str:
        """Waits until the process dies, or does not answer whether it lives; what happened."""
        died = asyncio.ensure_future(life.process.died())
        try:
            while True:
                done, _ = await asyncio.wait({died}, timeout=self._health_timeout / 4)
                if done:
                    return str(died.result())
                try:
                    await life.client.health(self._health_timeout)
                except TrainerError as error:
                    if not died.done():
                        return str(error)
        finally:
            died.cancel()
            await asyncio.gather(died, return_exceptions=True)

    async def _recover(self, life: _Life, why: str, made: Made = _untold) -> None:
        """Another process in place of `life`'s, at the same version.

        Raises:
            TrainerError: there have been too many, or the steps since the last checkpoint are not all on record.
        """
        async with self._mending:
            if self._life is not life:
                return  # somebody else noticed, too
            self._life = None
            self._recovery = recovery = asyncio.ensure_future(self._replace(life, why, made))
            try:
                self._life = await recovery
            finally:
                self._recovery = None

    async def _replace(self, life: _Life | None, why: str, made: Made) -> _Life:
        while True:
            if life is not None:
                await _end(life)
            self._losses += 1
            if self._losses >= LOSSES:
                raise TrainerError(
                    f"the trainer was lost {LOSSES} times and made no step in between; the last time: {why}"
                )
            self._note(f"the trainer is lost: {why.splitlines()[0]}; starting it again, to version {self.version}")
            self.restarts += 1
            life = None
            try:
                life = await self._begin()
                await self._catch_up(life, made)
            except (TrainerLostError, ChildError) as error:
                why = str(error)
            except BaseException:
                if life is not None:
                    await _end(life)
                raise
            else:
                self._note(f"the trainer is back at version {self.version}")
                return life

    async def _begin(self) -> _Life:
        process = await self._start()
        client = await TrainerClient(process.url, self._step_timeout, process.token).__aenter__()
        return _Life(process, client)

    async def _catch_up(self, life: _Life, made: Made = _untold) -> None:
        """Load the last checkpoint and make the steps since once more; publish again what was published.

        Raises:
            TrainerError: the steps since are not all on record.
        """
        past = await in_background(self._history.open)
        await self._follow(life, past, made)
        if past.version != self.version:
            raise TrainerError(
                f"the trainer was lost at version {self.version}, and the journal leads to version {past.version} only"
            )
        if self._served is not None:
            served = self._served
            await self._watched(life, lambda client: client.publish(served))

    async def _follow(self, life: _Life, past: Reading, made: Made) -> None:
        if past.checkpoint is not None:
            path = past.checkpoint.path
            await self._watched(life, lambda client: client.load(path))
        async for batch in past.batches():
            result = await self._watched(life, _step_of(batch))
            made(batch, result)


async def _last_words(process: Process) -> str:
    """What it died of, which says more than the connection that was lost; nothing if it lives."""
    try:
        async with asyncio.timeout(LAST_WORDS):
            return str(await process.died())
    except TimeoutError:
        return ""


def _step_of(batch: Batch) -> Callable[[TrainerClient], Awaitable[StepResult]]:
    return lambda client: client.step(batch)


async def _end(life: _Life, grace: float = 0.0) -> None:
    """One that is stopped might wake up again: without grace it is killed for sure."""
    await life.client.close()
    await life.process.stop(grace)
