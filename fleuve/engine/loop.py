"""The thread that runs the engine's steps, and its face towards asyncio.

Everything that touches the engine is a command in one queue, carried out between two steps in the order it came; so is
an abort before a request that reuses the id. New weights are read and verified beside the running engine; only the
copy into the model is a command. Results come back to the event loop in one call a step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from fleuve.engine.engine import Engine, Outcome, RequestError, Update
from fleuve.types import Completion, GenerationRequest, Interrupt, Invitation, Progress, WeightFile, WeightUpdate
from fleuve.weights.broadcast import Receiver
from fleuve.weights.store import read_weights

T = TypeVar("T")
OnToken = Callable[[int, float], None]


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended; its own error, if any, is the cause."""


class EngineLoop:
    """Start and use it within one running event loop. `failed` is set to the error that ended the thread, if one did;
    every request and command then fails too."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[str, asyncio.Future[Completion]] = {}  # by our own id
        self._ids: dict[str, str] = {}  # the client's id to ours
        self._streams: dict[str, OnToken] = {}
        self._landings: dict[Update, asyncio.Future[WeightUpdate]] = {}
        self._updates: dict[WeightFile, asyncio.Task[WeightUpdate]] = {}
        self._commands: set[Future[Any]] = set()
        self._loaded: WeightFile | None = None
        self._receiver = Receiver(str(engine.runner.device))
        self._count = 0
        self._paused = False
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to run steps."""
        self._thread.start()

    async def stop(self, seconds: float = 10.0) -> None:
        """End the thread after the step it is in; what is in flight fails with EngineStoppedError.

        Raises:
            TimeoutError: the step did not end in time.
        """
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {seconds:g} s")

    # --- the contract -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest, on_token: OnToken | None = None) -> Completion:
        """One answer. `on_token(token, logprob)` is called on the event loop as tokens come. Cancelling aborts.

        Raises:
            RequestError: it cannot be served as it is.
            NotFiniteError: the weights gave logits that are not numbers.
            EngineStoppedError: the engine ended first.
        """
        self._alive()
        self.engine.check(request)
        if request.request_id in self._ids:
            raise RequestError(f"request_id {request.request_id!r} is already in use")
        self._count += 1
        ours = f"{self._count}:{request.request_id}"  # a late result of a cancelled request must not meet its successor
        answer: asyncio.Future[Completion] = self._loop.create_future()
        self._ids[request.request_id] = ours
        self._answers[ours] = answer
        if on_token is not None:
            self._streams[ours] = on_token
        inner = msgspec.structs.replace(request, request_id=ours)
        self._inbox.put(lambda: self.engine.add(inner))
        try:
            completion = await answer
        except asyncio.CancelledError:
            self._inbox.put(lambda: self._discard(ours))
            raise
        finally:
            self._streams.pop(ours, None)
            self._answers.pop(ours, None)
            self._ids.pop(request.request_id, None)
        return msgspec.structs.replace(completion, request_id=request.request_id)

    async def update_weights(
        self, weights: WeightFile, interrupt: Interrupt, invitation: Invitation | None = None
    ) -> WeightUpdate:
        """Read, verify and swap in new weights: from their file, or from the broadcast that one is invited to.
        `seconds` of the reply is how long generation stood still.

        An update that is repeated, or older than what is loaded already, changes nothing and is acknowledged.

        Raises:
            WeightError, WeightsMismatchError: they are not whole or do not fit; the old ones stay in use.
            EngineStoppedError: the engine ended first.
        """
        self._alive()
        if weights == self._loaded or weights.version < self.engine.version:
            return WeightUpdate(version=self.engine.version, interrupted=0, seconds=0.0)
        task = self._updates.get(weights)
        if task is None:
            task = asyncio.create_task(self._update(weights, interrupt, invitation))
            self._updates[weights] = task
            task.add_done_callback(lambda _: self._updates.pop(weights, None))
        return await asyncio.shield(task)  # a client that goes away does not undo it, one that retries joins it

    async def abort(self, request_ids: list[str]) -> int:
        """End these requests: each answers with what it has, finish reason `abort`. Returns how many were in flight."""
        ours = [self._ids[i] for i in dict.fromkeys(request_ids) if i in self._ids]

        def command() -> None:
            ended = self.engine.abort(ours)
            self._loop.call_soon_threadsafe(self._settle, Outcome(ended=list(ended)))

        await self._command(command)
        return len(ours)

    async def progress(self, known: dict[str, int]) -> list[Progress]:
        """What has come of these requests beyond the tokens known of each; those not in flight are left out."""
        theirs = {self._ids[i]: i for i in known if i in self._ids}
        found = await self._command(lambda: self.engine.progress({ours: known[i] for ours, i in theirs.items()}))
        return [msgspec.structs.replace(p, request_id=theirs[p.request_id]) for p in found]

    async def pause(self) -> None:
        """No step begins after this returns, until `resume`. Weights can still be swapped."""
        await self._command(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        """Go on; nothing changes if it was not paused. What came during the pause is taken up as if it had all come at
        once (`Engine.settle`)."""

        def go_on() -> None:
            if self._paused:
                self.engine.settle()
                self._paused = False

        await self._command(go_on)

    async def metrics(self) -> dict[str, float]:
        """The engine's counters (see `Engine.metrics`) and whether it is paused."""
        return await self._command(lambda: {**self.engine.metrics(), "paused": float(self._paused)})

    # --- on the event loop ------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._ended is not None:
            raise EngineStoppedError(f"the engine has stopped: {self._ended!r}") from self._ended

    async def _command(self, command: Callable[[], T]) -> T:
        self._alive()
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(command())
            except Exception as error:
                done.set_exception(error)

        self._commands.add(done)
        self._inbox.put(run)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._commands.discard(done)

    async def _update(self, weights: WeightFile, interrupt: Interrupt, invitation: Invitation | None) -> WeightUpdate:
        def read() -> Update:
            tensors = self._receiver.read(weights, invitation) if invitation else read_weights(weights)
            self.engine.parameters.check(tensors)
            return Update(version=weights.version, tensors=tensors, interrupt=interrupt)

        update = await asyncio.to_thread(read)
        self._alive()
        landing: asyncio.Future[WeightUpdate] = self._loop.create_future()
        self._landings[update] = landing
        self._inbox.put(lambda: self.engine.request_update(update))
        result = await landing
        if result.version == weights.version:
            self._loaded = weights
        return result

    def _settle(self, outcome: Outcome) -> None:
        for request_id, token, logprob in outcome.sampled:
            if (stream := self._streams.get(request_id)) is not None:
                stream(token, logprob)
        for end in outcome.ended:
            request_id = end[0] if isinstance(end, tuple) else end.request_id
            answer = self._answers.get(request_id)
            if answer is None or answer.done():
                continue
            if isinstance(end, tuple):
                answer.set_exception(end[1])
            else:
                answer.set_result(end)
        for update in outcome.updated:
            landing = self._landings.pop(update)
            if not landing.done() and update.result is not None:
                landing.set_result(update.result)

    def _end(self, error: BaseException | None) -> None:
        self._ended = error or EngineStoppedError("stopped")
        waiting: list[Any] = [*self._answers.values(), *self._landings.values(), *self._commands]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineStoppedError(f"the engine has stopped: {self._ended!r}"))
        if not self.failed.done():
            if error is None:
                self.failed.set_result(None)
            else:
                self.failed.set_exception(error)

    # --- on the engine's thread -------------------------------------------------------------------------------------

    def _discard(self, ours: str) -> None:
        self.engine.abort([ours])

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._carry_out(block=self._paused or self.engine.idle):
                outcome = Outcome()
                if self._paused:
                    self.engine.apply_updates(outcome)
                elif not self.engine.idle:
                    outcome = self.engine.step()
                if outcome.ended or outcome.updated or (outcome.sampled and self._streams):
                    self._loop.call_soon_threadsafe(self._settle, outcome)
        except BaseException as caught:
            error = caught
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, error)

    def _carry_out(self, block: bool) -> bool:
        """Carry out every command in the queue, waiting for one if `block`; False when the end was asked for."""
        while True:
            try:
                command = self._inbox.get(block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            block = False
