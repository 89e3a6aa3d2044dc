"""A place in the fleet, and the lives of the processes that fill it one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from fleuve.contracts import ContinuingEngine, RolloutEngine, RolloutError, WorkerLostError
from fleuve.control.begun import Begun
from fleuve.control.health import Health, HealthPolicy, HealthRecord
from fleuve.control.router import Pressure
from fleuve.types import Completion, GenerationRequest

T = TypeVar("T")


REMOVED = "it was removed"
"""Why a life was over that was ended on purpose: nobody's loss."""


@dataclass(eq=False)
class Life:
    """One process that serves as the worker `name`: from when it answers until it is given up.

    `version` is the newest that it is known to sample with. `generated` counts tokens, as of the last time it said.
    """

    name: str
    engine: RolloutEngine
    version: int
    generated: float = 0.0
    over: str = ""
    """Why it was given up; empty while it lives."""
    distrusted: bool = False
    """It was given up for what it sampled: nothing of that is of use."""
    begun: dict[str, Begun] = field(default_factory=dict)
    """What is known of its unfinished answers, by the id of the request."""
    pressure: Pressure = field(default_factory=Pressure)
    """On its KV cache."""
    _calls: dict[asyncio.Timeout, None] = field(default_factory=dict)

    async def call(self, what: Callable[[RolloutEngine], Awaitable[T]]) -> T:
        """What the engine returns, unless this life ends first: whatever it would still say is not waited for then,
        and is not taken.

        Raises:
            WorkerLostError: it was given up.
            RolloutError: what the engine raised.
        """
        if self.over:
            raise WorkerLostError(f"{self.name}: {self.over}")
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._calls[limit] = None
                try:
                    return await what(self.engine)
                finally:
                    self._calls.pop(limit, None)
        except TimeoutError:
            if limit.expired():
                raise WorkerLostError(f"{self.name}: {self.over}") from None
            raise

    async def generate(self, request: GenerationRequest) -> Completion:
        """One answer of the engine.

        Raises:
            WorkerLostError: it was given up; or there is another process in its place, with older weights.
            RolloutError: what the engine raised; or this is the reply to another request.
        """
        version = self.version
        completion = await self.call(lambda engine: engine.generate(request))
        if completion.request_id != request.request_id:
            asked, got = request.request_id, completion.request_id
            raise RolloutError(f"{self.name}: {asked} was answered by the reply to {got}")
        if len(completion.versions) and completion.versions[0] < version:
            self.distrusted = True
            raise WorkerLostError(f"{self.name}: sampled with version {completion.versions[0]}, and had {version}")
        return completion

    @cached_property
    def continues(self) -> bool:
        """Whether it goes on with answers that another worker has begun, and tells how far it has come. Looked up once:
        the check of a protocol costs more than all else that an answer does here."""
        return isinstance(self.engine, ContinuingEngine)

    async def collect(self) -> None:
        """Learn how far it has come with its answers.

        Raises:
            RolloutError: it does not say.
        """
        engine = self.engine
        if self.begun and isinstance(engine, ContinuingEngine):
            known = {request_id: len(begun) for request_id, begun in self.begun.items()}
            for progress in await self.call(lambda _: engine.progress(known)):
                if (begun := self.begun.get(progress.request_id)) is not None:
                    begun.add(progress)

    @property
    def calls(self) -> int:
        """Calls that wait for it."""
        return len(self._calls)

    def end(self, why: str) -> None:
        """Give it up: every call that waits for it fails at once."""
        self.over = why
        now = asyncio.get_running_loop().time()
        for limit in self._calls:
            limit.reschedule(now)


class Worker:
    """One place in the fleet: its name, its health, and the life that fills it now (None: between two). One that is
    living has a life; one that is resyncing has one that nobody else uses yet."""

    def __init__(self, name: str, policy: HealthPolicy, life: Life | None, now: float = 0.0) -> None:
        self.name = name
        self.life = life
        self.health = HealthRecord(policy, Health.HEALTHY if life else Health.STARTING, now)
        self.leaving = False
        self.why = ""
        """Why it was given up last."""
        self.decision: asyncio.Task[None] | None = None
        """A probe under way."""
