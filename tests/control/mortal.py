"""Rollout workers that die, hang and come back, on virtual time, and a supervisor that starts new ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

import numpy as np
from world import Engine, Notes, heavy_tail

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.control.fleet import Fleet, FleetPolicy
from fleuve.types import Completion, GenerationRequest, Interrupt, Progress, WeightFile, WeightUpdate


class Mortal(Engine):
    """An engine whose process can be killed, stopped (nothing answers) and continued. The token at place `i` of an
    answer is a function of the request's seed and `i` alone."""

    def __init__(
        self,
        name: str,
        rng: random.Random,
        update_seconds: float = 0.02,
        length: Callable[[random.Random], int] = heavy_tail,
    ) -> None:
        super().__init__(rng, length, update_seconds)
        self.name = name
        self.dead = False
        self.refuses_weights = False
        self.stuck = False  # it answers probes, and does nothing
        self.requests: list[str] = []
        self.continued: list[str] = []
        self.sampled: dict[str, list[int]] = {}  # versions of the tokens of answers in flight
        self.given: dict[str, tuple[int, int]] = {}  # tokens that came with the request, and its seed
        self._going = asyncio.Event()
        self._going.set()
        self._death = asyncio.Event()

    def die(self) -> None:
        """kill -9."""
        self.dead = True
        self._death.set()
        self._going.set()

    def stop(self) -> None:
        """SIGSTOP."""
        self._going.clear()

    def go_on(self) -> None:
        """SIGCONT."""
        self._going.set()

    async def _there(self) -> None:
        await self._going.wait()
        if self.dead:
            raise WorkerLostError(f"{self.name}: connection lost")

    async def _pass(self, seconds: float) -> None:
        """Time in which it may die or be stopped."""
        try:
            async with asyncio.timeout(seconds):
                await self._death.wait()
        except TimeoutError:
            pass
        await self._there()

    async def generate(self, request: GenerationRequest) -> Completion:
        await self._there()
        if self.fault(request) == "raise":
            raise RolloutError(f"{request.request_id} failed")
        self.requests.append(request.request_id)
        if request.output_ids:
            self.continued.append(request.request_id)
        seed = request.sampling.seed
        length = self.length(random.Random(seed) if seed else self.rng)
        given = len(request.output_ids)
        self.given[request.request_id] = given, seed
        versions = self.sampled[request.request_id] = []
        self.active += 1
        try:
            for _ in range(given, length):
                await self._pass(self.token_seconds * self.rng.uniform(0.8, 1.2))
                await self._running.wait()
                await self._there()
                if self.stuck:
                    await self._death.wait()
                    await self._there()
                versions.append(self.version)
                self.tokens += 1
        finally:
            self.active -= 1
            del self.sampled[request.request_id]
        return Completion(
            request_id=request.request_id,
            output_ids=[token(seed, i) for i in range(given, length)],
            logprobs=[0.0] * (length - given),
            versions=versions,
            finish_reason="stop",
        )

    async def health(self) -> int:
        await self._there()
        return self.version

    async def update_weights(self, weights: WeightFile, interrupt: Interrupt) -> WeightUpdate:
        await self._there()
        if self.refuses_weights:
            raise RolloutError(f"{self.name}: the update failed: checksum")
        await self._pass(self.update_seconds * self.rng.uniform(0.5, 1.5))
        return await super().update_weights(weights, interrupt)

    async def pause(self) -> None:
        await self._there()
        await super().pause()

    async def resume(self) -> None:
        await self._there()
        await super().resume()

    async def metrics(self) -> dict[str, float]:
        if self.stuck:
            await self._pass(120.0)
            raise RolloutError(f"{self.name}: no answer to metrics within 120 s")
        await self._there()
        return await super().metrics()


class Continuing(Mortal):
    """One that says how far it has come."""

    async def progress(self, known: Mapping[str, int]) -> list[Progress]:
        await self._there()
        return [self._progress(name, start) for name, start in known.items() if name in self.sampled]

    def _progress(self, name: str, start: int) -> Progress:
        versions = self.sampled[name][start:]
        given, seed = self.given[name]
        return Progress(
            request_id=name,
            start=start,
            output_ids=np.array([token(seed, given + start + i) for i in range(len(versions))], np.int32),
            logprobs=np.zeros(len(versions), np.float32),
            versions=np.array(versions, np.int32),
        )


def token(seed: int, place: int) -> int:
    """The token at `place` of the answer with that seed. Hardly ever do two answers begin alike: who counts what was
    scored, counts by text."""
    return (seed * 31 + place * 7) % (2**31 - 1)


class Hospital:
    """Implements `contracts.Supervisor`. `engines` holds every one that ever was; `now[name]` the latest of a name."""

    def __init__(
        self,
        workers: int,
        seed: int = 0,
        *,
        start_seconds: float = 2.0,
        update_seconds: float = 0.02,
        continuing: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.start_seconds, self.update_seconds = start_seconds, update_seconds
        self.engines: list[Engine] = []
        self.now: dict[str, Mortal] = {}
        self.killed: list[str] = []
        self.starts_fail = False
        self.length: Callable[[random.Random], int] = heavy_tail
        self.kind = Continuing if continuing else Mortal
        for index in range(workers):
            self._make(f"worker-{index}")

    def _make(self, name: str) -> Mortal:
        engine = self.kind(name, random.Random(self.rng.random()), self.update_seconds, lambda rng: self.length(rng))
        self.engines.append(engine)
        self.now[name] = engine
        return engine

    async def kill(self, worker: str) -> str:
        self.killed.append(worker)
        await asyncio.sleep(0.1)
        if worker in self.now:
            self.now[worker].die()
        return "killed"

    async def start(self, worker: str) -> Mortal:
        await asyncio.sleep(self.start_seconds * self.rng.uniform(0.5, 1.5))
        if self.starts_fail:
            raise RolloutError(f"{worker} did not come up")
        assert worker not in self.now or self.now[worker].dead  # nobody samples under a name that is started again
        return self._make(worker)


def fleet_of(hospital: Hospital, observer: Notes, policy: FleetPolicy | None = None, seed: int = 0) -> Fleet:
    """The hospital's workers as they are now."""
    engines = list(hospital.now.values())
    return Fleet(engines, seed, supervisor=hospital, policy=policy or FleetPolicy(), observer=observer)
