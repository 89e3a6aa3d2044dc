"""A rollout worker on which things go wrong.

Event-driven: an answer is a timer, set anew when its worker stops or goes on. Times are virtual.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.simulate.faults import Case, Chance, WorkerFault
from fleuve.simulate.ledger import Ledger, group_of, logprob_of, name_of, token
from fleuve.simulate.lies import KINDS, Reply, falsified
from fleuve.simulate.tries import ViolationError
from fleuve.types import Completion, GenerationRequest, Interrupt, WeightFile, WeightUpdate


class _Flight:
    """One answer being generated: it goes on from `since`, having `left` tokens to go."""

    def __init__(self, request: GenerationRequest, tokens: int, seconds: float, deadline: float) -> None:
        self.request = request
        self.left = tokens
        self.cut_short = False
        """Its last token is the last that was asked for, and not the end of the answer."""
        self.whole = False
        """All of it is there, and the reply never comes."""
        self.told = len(request.output_ids)
        """Tokens of the answer that are known elsewhere."""
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
        self.wrong = ""
        """Why it may be given up: what went wrong with it; empty if nothing did."""
        self.removed = ""
        """How it is to leave, if it is."""
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
        self.over = False
        """The run is."""
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
    def hangs(self) -> bool:
        """Whether it stands still and says nothing."""
        return self._hanging

    @property
    def known(self) -> bool:
        """Whether it is the process that the fleet takes it for: it was not reborn."""
        return not self._reborn

    # --- contracts.RolloutEngine ------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        self._connected(f"request {request.request_id}")
        rates, chance = self._case.rates, self._chance
        await chance.turns()
        try:
            completion = await self._sample(request)
        except RolloutError:
            self._ledger.hurts(request.request_id)
            raise
        finally:
            if self.wrong:
                self._ledger.hurts(request.request_id)
        self._ledger.answered(completion)
        if completion.finish_reason == "abort":
            self._ledger.saw("aborted")
            self._ledger.hurts(request.request_id)
        await chance.turns()
        last, self._last = self._last, completion
        if last is not None and chance.happens(rates.mixed_up):
            self._ledger.saw("mixed up")
            self._ledger.hurts(request.request_id)
            return last
        # More often where there is more to be wrong: of what goes on behind another's tokens.
        false = chance.happens(0.5 if request.output_ids and rates.false else rates.false)
        return self._falsify(request, completion) if false else completion

    async def _sample(self, request: GenerationRequest) -> Completion:
        rates, chance, most = self._case.rates, self._chance, request.sampling.max_new_tokens
        known = len(request.output_ids)
        if known >= most:
            raise ViolationError(
                f"{self.name} is asked for more of {request.request_id}, which has {known} tokens of {most}"
            )
        if chance.happens(rates.refused):
            self._ledger.saw("refused")
            raise RolloutError(f"{self.name}: request {request.request_id} failed: refused")
        if not self._away and random.Random(request.sampling.seed).random() < rates.deadly:
            self._ledger.kills(group_of(request.request_id))
            self.strike(WorkerFault(0, "dies", 0.0, 0.0))
        if request.request_id in self._flights:
            raise AssertionError(f"{self.name}: two requests {request.request_id} at once")
        flight = self._flights[request.request_id] = self._flight(request)
        try:
            self._connected(f"request {request.request_id}")
            self._go(flight)
            versions = await flight.reply
        finally:
            if flight.timer is not None:
                flight.timer.cancel()
            del self._flights[request.request_id]
            self._change()
        return self._completion(flight, versions)

    def _flight(self, request: GenerationRequest) -> _Flight:
        """How long the answer is, and how long it takes."""
        case, chance, rates = self._case, self._chance, self._case.rates
        known, most = len(request.output_ids), request.sampling.max_new_tokens
        length = max(chance.length(case.tail), known + 1)
        seconds = chance.seconds(case.token_seconds)
        if chance.happens(rates.slow):
            self._ledger.saw("slow")
            seconds *= 20.0
        if chance.happens(rates.lost):
            self._ledger.saw("lost")
            seconds = math.inf
        deadline = asyncio.get_running_loop().time() + case.request_timeout
        flight = _Flight(request, min(length, most) - known, seconds, deadline)
        flight.cut_short = length >= most
        return flight

    def _falsify(self, request: GenerationRequest, completion: Completion) -> Completion:
        """What it hands in cannot be."""
        kind = KINDS[self._chance.pick(len(KINDS))]
        if request.output_ids and self._chance.pick(2):
            kind = "long"
        self._ledger.hurts(request.request_id)
        reply = completion.output_ids, completion.logprobs, completion.versions
        ids, logprobs, versions = self.lie(reply, kind, request.sampling.max_new_tokens - len(request.output_ids))
        changed = {"output_ids": ids, "logprobs": logprobs, "versions": versions, "finish_reason": "stop"}
        return msgspec.structs.replace(completion, **changed)

    def lie(self, reply: Reply, kind: str, room: int) -> Reply:
        self._ledger.event("lie", self.name, kind)
        self._ledger.saw(f"false: {kind}")
        self.wrong = "it lied"
        return falsified(reply, kind, self._chance, self._first_version, self._case.steps, room)

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
                self.wrong = "an update failed"
                self._ledger.saw("update failed")
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
            self.wrong = f"no answer to {what}"
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
        self._ledger.saw(fault.kind)
        self.wrong = fault.kind
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
            if flight.told >= flight.request.sampling.max_new_tokens and not flight.reply.done():
                self._ledger.saw("lost with every token known")
            self._fail(flight, WorkerLostError(f"{self.name}: connection lost during {what}"))

    # --- generation -------------------------------------------------------------------------------------------------

    def _completion(self, flight: _Flight, versions: list[int]) -> Completion:
        aborted = self._chance.happens(self._case.rates.aborted)
        ids = tokens_of(flight, versions)
        return Completion(
            request_id=flight.request.request_id,
            output_ids=ids,
            logprobs=list(map(logprob_of, ids)),
            versions=versions,
            finish_reason="abort" if aborted else "length" if flight.cut_short else "stop",
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
        if flight.reply.done():
            return
        loop = asyncio.get_running_loop()
        end = math.inf
        if not (flight.whole or self.standing or (self._closed and not flight.versions)):
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
        if self._chance.happens(self._case.rates.cut_off):
            self._end_of(flight)
            return
        flight.versions += [self.version] * flight.left
        flight.left, flight.since = 0, None
        self._tokens += len(flight.versions)
        flight.reply.set_result(flight.versions)

    def _end_of(self, flight: _Flight) -> None:
        """The answer is whole, and the worker dies before it is handed in. Others may know all of its tokens, but the
        one that would have told them that there are no more."""
        done = flight.left if flight.cut_short else flight.left - 1
        flight.versions += [self.version] * done
        flight.left -= done
        flight.since, flight.whole = None, True
        self._go(flight)
        self._ledger.saw("cut off")
        self.die_within(2.0)

    def die_within(self, seconds: float) -> None:
        """So many, or thereabouts."""

        def die() -> None:
            if not self._away and not self.over:
                self.strike(WorkerFault(0, "dies", 0.0, 0.0))

        asyncio.get_running_loop().call_later(self._chance.seconds(seconds), die)


def tokens_of(flight: _Flight, versions: list[int]) -> list[int]:
    """Each token says by which version it was sampled; the first two also whose they are."""
    whose = [int(part) for part in name_of(flight.request.request_id).split("/")]
    places = range(flight.asked_at, flight.asked_at + len(versions))
    return [token(whose[i] if i < 2 else 0, version) for i, version in zip(places, versions, strict=True)]
