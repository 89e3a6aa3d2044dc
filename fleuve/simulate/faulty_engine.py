"""Rollout workers on which things go wrong, and the supervisor that ends and starts them.

Event-driven: an answer is a timer, set anew when its worker stops or goes on. Times are virtual.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.simulate.faults import Case, Chance, WorkerFault
from fleuve.simulate.ledger import Ledger, token
from fleuve.types import Completion, GenerationRequest, Interrupt, Progress, WeightFile, WeightUpdate


class _Flight:
    """One answer being generated: it goes on from `since`, having `left` tokens to go."""

    def __init__(self, request: GenerationRequest, tokens: int, seconds: float, deadline: float) -> None:
        self.request = request
        self.left = tokens
        self.token_seconds = seconds
        self.deadline = deadline
        self.asked_at = len(request.output_ids)
        """Tokens of the answer that another engine had sampled."""
        self.since: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.versions: list[int] = []
        self.interruptions = 0
        self.reply: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()


class FaultyEngine:
    """Implements `contracts.RolloutEngine`: a token every `token_seconds`, stamped with the version loaded then."""

    def __init__(self, name: str, case: Case, ledger: Ledger, version: int, chance: Chance, fails_at: int = -1) -> None:
        """`fails_at`: the number of the update that fails here."""
        self.name = name
        self.version = version
        self._first_version = version
        self._case = case
        self._ledger = ledger
        self._chance = chance
        self._fails_at = fails_at
        self._flights: dict[str, _Flight] = {}
        self._last: Completion | None = None
        self._paused = False
        self._hanging = False
        self._away = False
        self._reborn = False
        self._closed = False  # an update under `finish` lets nobody in
        self._updates = 0
        self._tokens = 0
        self._changed = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether anything is being asked of it."""
        return bool(self._flights)

    @property
    def standing(self) -> bool:
        """Whether it computes nothing."""
        return self._paused or self._hanging or self._away

    @property
    def known(self) -> bool:
        """Whether it is the process that the fleet takes it for: it was not reborn."""
        return not self._reborn

    # --- contracts.RolloutEngine ------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        self._connected(f"request {request.request_id}")
        rates, chance = self._case.rates, self._chance
        await chance.turns()
        if chance.happens(rates.refused):
            raise RolloutError(f"{self.name}: request {request.request_id} failed: refused")
        tokens = max(chance.length(self._case.tail) - len(request.output_ids), 1)
        seconds = chance.seconds(self._case.token_seconds * (20.0 if chance.happens(rates.slow) else 1.0))
        if chance.happens(rates.lost):
            seconds = math.inf
        now = asyncio.get_running_loop().time()
        flight = _Flight(request, tokens, seconds, now + self._case.request_timeout)
        if request.request_id in self._flights:
            raise AssertionError(f"{self.name}: two requests {request.request_id} at once")
        self._flights[request.request_id] = flight
        try:
            self._connected(f"request {request.request_id}")
            self._go(flight)
            versions = await flight.reply
        finally:
            if flight.timer is not None:
                flight.timer.cancel()
            del self._flights[request.request_id]
            self._change()
        completion = self._completion(flight, versions)
        self._ledger.answered(_name(request), versions)
        await chance.turns()
        last, self._last = self._last, completion
        if last is not None and chance.happens(rates.mixed_up):
            return last
        return completion

    async def update_weights(self, weights: WeightFile, interrupt: Interrupt) -> WeightUpdate:
        number, self._updates = self._updates, self._updates + 1
        what = f"the update to version {weights.version}"
        timeout = self._case.update_timeout + (self._case.request_timeout if interrupt == "finish" else 0.0)

        async def update() -> None:
            if interrupt == "finish":
                self._closed = True
                while any(f.since is not None or f.versions for f in self._flights.values()):
                    await self._changed.wait()
            await asyncio.sleep(self._chance.seconds(self._case.update_seconds))
            await self._while_hanging(what)
            if number == self._fails_at:
                raise RolloutError(f"{self.name}: {what} failed: no space left")
            self._ledger.updated(self.name, self.version, weights.version)
            for flight in self._flights.values():
                self._hold(flight)
                flight.interruptions += 1
            self.version = weights.version

        try:
            await self._within(timeout, what, update)
        finally:
            self._closed = False
            self._go_on()
        return WeightUpdate(version=weights.version, interrupted=len(self._flights), seconds=0.0)

    async def health(self) -> int:
        await self._ask("a probe")
        return self.version

    async def abort(self, request_ids: Sequence[str]) -> None:
        for id in request_ids:
            if id in self._flights:
                self._fail(self._flights[id], RolloutError(f"{self.name}: request {id} was aborted"))

    async def pause(self) -> None:
        await self._ask("pause")
        self._paused = True
        for flight in self._flights.values():
            self._hold(flight)

    async def resume(self) -> None:
        await self._ask("resume")
        self._paused = False
        self._go_on()

    async def metrics(self) -> dict[str, float]:
        await self._ask("metrics")
        return {"tokens_generated": float(self._tokens), "running": float(len(self._flights))}

    async def _ask(self, what: str) -> None:
        """A small request, and the wait for the reply."""
        await self._within(self._case.update_timeout, what, lambda: self._while_hanging(what))

    async def _within(self, timeout: float, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """
        Raises:
            WorkerLostError: the worker is away.
            RolloutError: it did not answer in time.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._chance.turns()
                self._connected(what)
                await work()
                await self._chance.turns()
        except TimeoutError:
            raise RolloutError(f"{self.name}: no answer to {what} within {timeout:g} s") from None

    async def _while_hanging(self, what: str) -> None:
        while self._hanging:
            await self._changed.wait()
        self._connected(what)

    def _connected(self, what: str) -> None:
        if self._away:
            raise WorkerLostError(f"{self.name}: connection lost during {what}")

    # --- what goes wrong --------------------------------------------------------------------------------------------

    def strike(self, fault: WorkerFault) -> None:
        """`fault` happens now."""
        self._ledger.event("fault", self.name, fault.kind)
        match fault.kind:
            case "hang":
                self._hanging = True
                for flight in self._flights.values():
                    self._hold(flight)
            case "reborn":
                self._lose_flights()
                self._reborn = True
                self.version, self._paused, self._hanging = self._first_version, False, False
            case _:
                self.end()
        self._change()

    def mend(self) -> None:
        """The fault is over; what it had in flight when it went away stays lost."""
        self._ledger.event("mended", self.name)
        self._hanging = self._away = False
        self._go_on()

    def end(self) -> None:
        """Nobody answers any more."""
        self._away, self._hanging = True, False
        self._lose_flights()
        self._change()

    def _lose_flights(self) -> None:
        for flight in list(self._flights.values()):
            what = f"request {flight.request.request_id}"
            self._fail(flight, WorkerLostError(f"{self.name}: connection lost during {what}"))

    # --- generation -------------------------------------------------------------------------------------------------

    def _completion(self, flight: _Flight, versions: list[int]) -> Completion:
        aborted = self._chance.happens(self._case.rates.aborted)
        return Completion(
            request_id=flight.request.request_id,
            output_ids=_tokens(flight, versions),
            logprobs=[0.0] * len(versions),
            versions=versions,
            finish_reason="abort" if aborted else "length" if flight.asked_at + len(versions) > 60 else "stop",
            interruptions=flight.interruptions,
        )

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail(self, flight: _Flight, error: RolloutError) -> None:
        if not flight.reply.done():
            flight.reply.set_exception(error)

    def _go_on(self) -> None:
        for flight in self._flights.values():
            if flight.since is None:
                self._go(flight)
        self._change()

    def _go(self, flight: _Flight) -> None:
        """Set the timer for the answer's end, or its deadline if that comes first."""
        loop = asyncio.get_running_loop()
        end = math.inf
        if not (self.standing or (self._closed and not flight.versions)):
            flight.since = loop.time()
            end = flight.since + flight.left * flight.token_seconds
        if flight.timer is not None:
            flight.timer.cancel()
        flight.timer = loop.call_at(min(end, flight.deadline), self._due, flight, end <= flight.deadline)

    def _hold(self, flight: _Flight) -> None:
        """Write down the tokens that it has by now."""
        if flight.since is None:
            return
        elapsed = asyncio.get_running_loop().time() - flight.since
        done = flight.left - 1
        if flight.token_seconds > 0:
            done = min(done, int(elapsed / flight.token_seconds))
        flight.versions += [self.version] * done
        flight.left -= done
        flight.since = None
        self._go(flight)

    def _due(self, flight: _Flight, done: bool) -> None:
        if flight.reply.done():
            return
        if not done:
            what = f"request {flight.request.request_id}"
            timeout = self._case.request_timeout
            self._fail(flight, RolloutError(f"{self.name}: no answer to {what} within {timeout:g} s"))
            return
        flight.versions += [self.version] * flight.left
        self._tokens += len(flight.versions)
        flight.reply.set_result(flight.versions)


class ContinuingFaultyEngine(FaultyEngine):
    """Implements `contracts.ContinuingEngine` too."""

    async def progress(self, known: Mapping[str, int]) -> list[Progress]:
        await self._ask("progress")
        told = []
        for id, flight in self._flights.items():
            self._hold(flight)
            start = known.get(id, 0)
            versions = flight.versions[start:]
            progress = Progress(
                request_id=id,
                start=start,
                output_ids=np.asarray(_tokens(flight, flight.versions)[start:], np.int32),
                logprobs=np.zeros(len(versions), np.float32),
                versions=np.asarray(versions, np.int32),
            )
            if id in known and not flight.reply.done():
                told.append(progress)
        self._go_on()
        return told


def _name(request: GenerationRequest) -> str:
    """The request's name without what marks it as taken up by another worker."""
    return request.request_id.partition("~")[0]


def _tokens(flight: _Flight, versions: list[int]) -> list[int]:
    """Each token says by which version it was sampled; the first two also whose they are."""
    whose = [int(part) for part in _name(flight.request).split("/")]
    places = range(flight.asked_at, flight.asked_at + len(versions))
    return [token(whose[i] if i < 2 else 0, version) for i, version in zip(places, versions, strict=True)]


class FaultyWorkers:
    """The workers' processes, and the `contracts.Supervisor` over them."""

    def __init__(self, case: Case, ledger: Ledger, version: int) -> None:
        self._case = case
        self._ledger = ledger
        self._version = version
        self._chances = {f"worker-{i}": Chance(case, f"worker-{i} from {version}") for i in range(case.workers)}
        fails_at = dict([case.failing_update]) if case.failing_update and version == 0 else {}
        self.engines = {
            name: self._engine(name, chance, fails_at.get(index, -1))
            for index, (name, chance) in enumerate(self._chances.items())
        }
        self.gone: list[FaultyEngine] = []
        call_later: Callable[..., asyncio.TimerHandle] = asyncio.get_running_loop().call_later
        faults = case.worker_faults if version == 0 else ()
        self._timers = [call_later(fault.at, self._strike, fault) for fault in faults]

    def _engine(self, name: str, chance: Chance, fails_at: int = -1) -> FaultyEngine:
        kind = ContinuingFaultyEngine if self._case.continues else FaultyEngine
        return kind(name, self._case, self._ledger, self._version, chance, fails_at)

    def close(self) -> None:
        """No more faults."""
        for timer in self._timers:
            timer.cancel()

    def _strike(self, fault: WorkerFault) -> None:
        engine = self.engines[f"worker-{fault.worker}"]
        engine.strike(fault)
        if fault.kind in ("hang", "away"):
            self._timers.append(asyncio.get_running_loop().call_later(fault.seconds, engine.mend))

    async def kill(self, worker: str) -> str:
        """End it; see `contracts.Supervisor`."""
        await self._chances[worker].turns()
        self._ledger.event("killed", worker)
        engine = self.engines[worker]
        engine.end()
        if engine not in self.gone:
            self.gone.append(engine)
        return "killed"

    async def start(self, worker: str) -> FaultyEngine:
        """A fresh one; see `contracts.Supervisor`."""
        chance = self._chances[worker]
        await asyncio.sleep(chance.seconds(self._case.start_seconds))
        if chance.happens(self._case.rates.no_start):
            raise RolloutError(f"{worker} did not start: no memory")
        self._ledger.event("started", worker)
        self.engines[worker] = self._engine(worker, chance)
        return self.engines[worker]
