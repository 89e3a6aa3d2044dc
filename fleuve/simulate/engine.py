"""A rollout engine on virtual time: exact to the decode step, at the cost of an event for what really happens.

All running answers advance by a token in every step, so between two events (an answer arrives or ends, the caches are
full, new weights, a pause) the time of k steps is a closed form. What comes in the middle of a step is met at its end;
a prefill, and the loading of weights, run to their end first.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fleuve.contracts import RolloutError
from fleuve.simulate.deadlines import Deadlines
from fleuve.simulate.history import CHUNK, VersionHistory
from fleuve.simulate.seats import ADMIT_ROOM, PREEMPT_ROOM, Answer, Seats
from fleuve.simulate.stretch import Stretch
from fleuve.types import Completion, FinishReason, GenerationRequest, Int32Array, Interrupt, WeightFile, WeightUpdate

Phase = Literal["idle", "paused", "decode", "prefill", "load"]


class EngineTimes(Protocol):
    """What an engine's work takes: `simulate.engine_costs.EngineCosts`, or a test's figures."""

    @property
    def kv_capacity_tokens(self) -> int: ...

    @property
    def max_running(self) -> int: ...

    def decode(self, sequences: int) -> tuple[float, float]: ...

    def prefill_seconds(self, tokens: int, pairs: float = 0.0, answers: int = 0) -> float: ...

    def update_seconds(self) -> float: ...


@dataclass(slots=True)
class Usage:
    """Where an engine's time went, in seconds since the start, and what came of it. `recompute` is the part of
    `prefill` that computed what had been computed before; `answers` is the integral of the running ones over time."""

    idle: float = 0.0
    paused: float = 0.0
    decode: float = 0.0
    prefill: float = 0.0
    load: float = 0.0
    recompute: float = 0.0
    answers: float = 0.0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    interrupted: int = 0
    preemptions: int = 0


@dataclass(eq=False, slots=True)
class _Update:
    version: int
    interrupt: Interrupt
    reply: asyncio.Future[WeightUpdate]


class SimulatedEngine:
    """Implements `contracts.RolloutEngine`.

    Args:
        name: what errors call it.
        lengths: how many tokens the answer to a request has, if it is not cut off.
        together: engines, this one among them, that take weights of kind `finish` when the answers of all have ended;
            none: each when its own have.
        request_timeout, update_timeout: seconds that callers wait, as those of the real client do.
        admit_room, preempt_room: see `seats`.
    """

    def __init__(
        self,
        name: str,
        times: EngineTimes,
        lengths: Callable[[GenerationRequest], int],
        version: int = 0,
        *,
        together: Sequence[SimulatedEngine] | None = None,
        admit_room: int = ADMIT_ROOM,
        preempt_room: int = PREEMPT_ROOM,
        request_timeout: float = math.inf,
        update_timeout: float = math.inf,
    ) -> None:
        self.name = name
        self.usage = Usage()
        self._times = times
        self._lengths = lengths
        self._together = (self,) if together is None else together
        self._seats = Seats(times.kv_capacity_tokens, times.max_running, admit_room, preempt_room)
        self._history = VersionHistory(version, lambda: self._seats.oldest_step)
        self._request_timeout, self._update_timeout = request_timeout, update_timeout
        self._deadlines = Deadlines(name)
        self._answers: dict[str, Answer] = {}
        self._arrivals = 0
        self._tokens = 0  # sampled before the stretch in progress
        self._updates: deque[_Update] = deque()
        self._leaving: list[Answer] = []  # aborted, until the step in progress ends
        self._paused = False
        self._phase: Phase = "idle"
        self._since = 0.0  # when the phase began
        self._stretch = Stretch(0, 0, 0.0, 0.0)
        self._stretch_since = 0.0
        self._planned = 0  # steps of the stretch before the next turn
        self._timer: asyncio.TimerHandle | None = None  # the next turn

    # --- the contract -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        """One answer; cancelling aborts it.

        Raises:
            RolloutError: prompt and `max_new_tokens` do not fit into the cache, the id is in use, or it took too long.
        """
        prompt, sampling = len(request.input_ids), request.sampling
        if prompt + sampling.max_new_tokens > self._seats.capacity:
            raise RolloutError(
                f"{self.name}: request {request.request_id}: prompt of {prompt} tokens + max_new_tokens "
                f"{sampling.max_new_tokens} do not fit into a KV cache of {self._seats.capacity}"
            )
        if request.request_id in self._answers:
            raise RolloutError(f"{self.name}: request_id {request.request_id!r} is already in use")
        natural = max(1, self._lengths(request))
        length = min(natural, sampling.max_new_tokens)
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        answer = Answer(request, reply, prompt, length, natural > length, self._arrivals)
        self._arrivals += 1
        self._answers[request.request_id] = answer
        if self._seats.may_take_more:
            self._turn_soon()
        self._seats.waiting.append(answer)
        what = f"request {request.request_id}"
        self._deadlines.begin(reply, self._request_timeout, "rollout.request_timeout", what)
        try:
            return await reply
        except (asyncio.CancelledError, RolloutError):
            self._abort(answer)
            raise
        finally:
            self._deadlines.end(reply, self._request_timeout)

    async def update_weights(self, weights: WeightFile, interrupt: Interrupt) -> WeightUpdate:
        """Lands between two steps, as `interrupt` says; one that is not newer is acknowledged.

        Raises:
            RolloutError: it took too long.
        """
        reply: asyncio.Future[WeightUpdate] = asyncio.get_running_loop().create_future()
        self._updates.append(_Update(weights.version, interrupt, reply))
        self._turn_soon()
        # `finish` lets the answers in flight end first, and each of them has the time of a request.
        limit = self._update_timeout + (self._request_timeout if interrupt == "finish" else 0.0)
        self._deadlines.begin(reply, limit, "rollout.update_timeout", f"the update to version {weights.version}")
        try:
            return await reply
        finally:
            self._deadlines.end(reply, limit)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with what they have after the step in progress; unknown ids are passed over."""
        found = [a for i in request_ids if (a := self._answers.get(i)) is not None]
        for answer in found:
            self._abort(answer)
        await asyncio.gather(*(a.reply for a in found), return_exceptions=True)

    async def pause(self) -> None:
        """No step begins until `resume`; updates still land."""
        self._paused = True
        self._turn_soon()

    async def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._turn_soon()

    async def health(self) -> int:
        """The version that it samples with."""
        return self._history.version

    async def metrics(self) -> dict[str, float]:
        """Counters since the start and the state of this moment; the embedded engine's names."""
        usage = self.usage_now()
        return {
            **self.room(),
            "version": self._history.version,
            "running": len(self._seats.running),
            "tokens_generated": self.tokens_generated(),
            "tokens_prefilled": usage.prefilled_tokens,
            "interrupted": usage.interrupted,
            "busy_seconds": usage.decode + usage.prefill + usage.load,
        }

    def room(self) -> dict[str, float]:
        """What of the metrics says how full the caches are."""
        kv = self._seats.kv + self.tokens_generated() - self._tokens
        return {
            "waiting": len(self._seats.waiting),
            "kv_cache_use": kv / self._seats.capacity,
            "preemptions": self.usage.preemptions,
        }

    # --- what it looks like now -------------------------------------------------------------------------------------

    def usage_now(self) -> Usage:
        """Up to this moment."""
        self._account(self._now())
        return self.usage

    def tokens_generated(self) -> int:
        """Up to the last whole step."""
        if self._phase != "decode":
            return self._tokens
        passed = self._now() - self._stretch_since
        steps = self._stretch.steps_until(passed)
        if self._stretch.seconds(steps) > passed:
            steps -= 1
        return self._tokens + self._stretch.sequences * min(steps, self._planned)

    # --- turns ------------------------------------------------------------------------------------------------------

    def _turn_soon(self) -> None:
        """Something happened: look again at the end of the step in progress, or now if there is none."""
        now = self._now()
        if self._phase in ("prefill", "load"):
            return
        at = now
        if self._phase == "decode":
            steps = self._stretch.steps_until(now - self._stretch_since)
            if steps >= self._planned:
                return
            self._planned = steps
            at = self._stretch_since + self._stretch.seconds(steps)
        elif self._timer is not None:
            return  # it looks now already
        self._wake(at)

    def _wake(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._turn, at)
        self._deadlines.watch(at)

    def _turn(self, at: float) -> None:
        """Between two steps, at the time `at`: who has ended leaves, and what comes next begins."""
        self._timer = None
        self._account(at)
        if self._phase == "decode":
            self._seats.advance(self._planned)
            self._tokens += self._planned * self._stretch.sequences
            self._history.reach(self._seats.steps)
            for answer in self._seats.pop_ended():
                self._answer(answer, "length" if answer.cut_off else "stop")
        elif self._phase == "load":
            self._loaded(self._updates.popleft())
        for answer in self._leaving:
            if self._answers.get(answer.request.request_id) is answer:
                self._answer(answer, "abort", self._seats.sampled(answer))
        self._leaving.clear()
        self._begin(at)

    def _begin(self, at: float) -> None:
        """The next phase."""
        while self._updates and self._updates[0].version <= self._history.version:
            self._acknowledge(self._updates.popleft(), interrupted=0, seconds=0.0)
        if self._updates and not self._waits_to_finish(self._updates[0]):
            self._enter("load", at, self._times.update_seconds())
            for other in self._together:
                if other._phase == "idle":
                    other._turn_soon()  # it may have waited for this one
            return
        if self._paused:
            self._enter("paused", at)
            return
        work = self._seats.admit(admit_new=not self._updates)
        seconds = self._times.prefill_seconds(work.tokens, work.pairs, work.fresh)
        if work.tokens or seconds:
            self.usage.prefilled_tokens += work.tokens
            self.usage.recomputed_tokens += work.again
            self.usage.recompute += seconds * work.again / max(work.tokens, 1)
            self._enter("prefill", at, seconds)
            return
        if not self._seats.running:
            self._enter("idle", at)
            return
        for answer in self._seats.preempt():
            self.usage.preemptions += 1
            if answer.joined < self._seats.steps:
                answer.pieces.append(self._history.between(answer.joined, self._seats.steps))
        running = len(self._seats.running)
        self._stretch = Stretch(running, self._seats.kv, *self._times.decode(running))
        self._stretch_since = at
        self._planned = self._seats.steps_ahead()
        self._enter("decode", at, self._stretch.seconds(self._planned))

    def _waits_to_finish(self, update: _Update) -> bool:
        """Whether answers have to end first that were begun with older weights."""
        if update.interrupt != "finish":
            return False
        return any(e._seats.begun for e in self._together if e._history.version < update.version)

    def _enter(self, phase: Phase, at: float, seconds: float | None = None) -> None:
        self._phase, self._since = phase, at
        if seconds is not None:
            self._wake(at + seconds)
        else:
            self._deadlines.watch(math.inf)

    def _account(self, now: float) -> None:
        """Book the time of the phase in progress."""
        passed = now - self._since
        if passed <= 0:
            return
        usage = self.usage
        setattr(usage, self._phase, getattr(usage, self._phase) + passed)
        usage.answers += passed * len(self._seats.running)
        self._since = now

    # --- ends -------------------------------------------------------------------------------------------------------

    def _abort(self, answer: Answer) -> None:
        self._leaving.append(answer)
        self._turn_soon()

    def _answer(self, answer: Answer, reason: FinishReason, tokens: int | None = None) -> None:
        """Reply with what the answer has; `tokens` if that is not all of it."""
        versions = self._versions(answer, tokens if tokens is not None else answer.length)
        if reason == "abort":
            self._seats.remove(answer)
        del self._answers[answer.request.request_id]
        if answer.reply.done():
            return  # cancelled
        count = len(versions)
        answer.reply.set_result(
            Completion(
                request_id=answer.request.request_id,
                output_ids=_TOKENS.first(count),  # type: ignore[arg-type]
                logprobs=_LOGPROBS.first(count),  # type: ignore[arg-type]
                versions=versions,  # type: ignore[arg-type]
                finish_reason=reason,
                interruptions=answer.interruptions,
            )
        )

    def _versions(self, answer: Answer, tokens: int) -> Int32Array:
        last = tokens - answer.done
        pieces = [*answer.pieces, self._history.between(answer.joined, answer.joined + last)] if last else answer.pieces
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)

    def _loaded(self, update: _Update) -> None:
        self._history.load(update.version, self._seats.steps)
        interrupted = self._seats.interrupt(drop_caches=update.interrupt != "keep")
        self.usage.interrupted += interrupted
        self._acknowledge(update, interrupted, self._times.update_seconds())

    def _acknowledge(self, update: _Update, interrupted: int, seconds: float) -> None:
        if not update.reply.done():
            update.reply.set_result(
                WeightUpdate(version=self._history.version, interrupted=interrupted, seconds=seconds)
            )

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class _Zeros:
    """Arrays of zeros that all answers share, however long they are: read-only."""

    def __init__(self, dtype: type) -> None:
        self._all: NDArray[Any] = np.zeros(CHUNK, dtype)

    def first(self, count: int) -> NDArray[Any]:
        """So many of them."""
        if count > len(self._all):
            self._all = np.zeros(2 * count, self._all.dtype)
        zeros = self._all[:count]
        zeros.flags.writeable = False
        return zeros


_TOKENS, _LOGPROBS = _Zeros(np.int32), _Zeros(np.float32)
