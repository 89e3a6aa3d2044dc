"""Rollout workers to whom weights are broadcast: all who are told of a version in the same moment get it together.

Nobody but the trainer's process sends, and nobody but the workers receive; here is said who meets whom. A version is
broadcast once. Who is told of it later (it joins, it was restarted), and who did not get it by the broadcast, takes the
published file, as with any other transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from fleuve.contracts import ContinuingEngine, RolloutError, TrainerError, WorkerLostError
from fleuve.launch.delivering import ContinuingDeliveringEngine, Deliver
from fleuve.types import Interrupt, Invitation, WeightFile, WeightUpdate
from fleuve.weights.invitation import Call, Hall, Loss


class Sending(Protocol):
    """The process that broadcasts what is published. Its methods raise a TrainerError where it is gone, or fails."""

    async def hall(self) -> Hall:
        """Where it holds its meetings."""

    async def broadcast(self, call: Call) -> None:
        """Returns when that is over."""

    async def lose(self, loss: Loss) -> None:
        """It goes on, or not, without that member."""


class Receiving(ContinuingEngine, Protocol):
    """A rollout worker that takes broadcasts, in so many processes (`seats`)."""

    @property
    def seats(self) -> int: ...

    async def update_weights(
        self, weights: WeightFile, interrupt: Interrupt, invitation: Invitation | None = None
    ) -> WeightUpdate: ...


class _Meeting:
    """Of those who are told of `weights` in the same moment."""

    def __init__(self, weights: WeightFile) -> None:
        self.weights = weights
        self.members: dict[str, int] = {}
        self.called: asyncio.Future[Hall | None] = asyncio.get_running_loop().create_future()
        """Set once everybody is in; None: there is none."""


class Broadcasts:
    """All those of a run. `seconds`: how long anybody is waited for. `note` hears of broadcasts that failed."""

    def __init__(self, sender: Sending, seconds: float, note: Callable[[str], None]) -> None:
        self._sender = sender
        self._seconds = seconds
        self._note = note
        self._number = 0
        self._meeting: _Meeting | None = None
        """Of the latest version."""
        self._sending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._came = 0
        self._missed = 0

    async def invite(self, member: str, seats: int, weights: WeightFile) -> Invitation | None:
        """To where `weights` will be broadcast, for one who is told of them now; None: they are to be had by the file.
        `member` is a name that nobody had before. Whoever has been invited is in the end a `loss`, or `came`."""
        meeting = self._meeting
        if meeting is None or meeting.weights != weights:
            if meeting is not None and meeting.weights.version > weights.version:
                return None
            meeting = self._meeting = _Meeting(weights)
            self._start(self._call(meeting))
        if meeting.called.done():
            return None
        meeting.members[member] = seats
        try:
            hall = await asyncio.shield(meeting.called)
        except asyncio.CancelledError:
            meeting.members.pop(member)
            if meeting.called.done():
                self._tell(Loss(number=self._number, member=member))
            raise
        if hall is None:
            return None
        return Invitation(address=hall.address, key=hall.key, number=self._number, member=member, seconds=self._seconds)

    def came(self) -> None:
        """A worker has its weights by a broadcast."""
        self._came += 1

    def loss(self, invitation: Invitation, worker: str, why: str) -> None:
        """`worker` did not get the weights that it was invited to: nobody is to wait for it."""
        self._missed += 1
        if why:
            self._note(f"{worker} takes the file: {why}")
        self._tell(Loss(number=invitation.number, member=invitation.member))

    def gauges(self) -> dict[str, float]:
        """For the metrics: updates of single workers that came by a broadcast, and that were to and did not."""
        return {"weights/broadcast": float(self._came), "weights/missed": float(self._missed)}

    async def close(self) -> None:
        """Nothing is asked of the sender any more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _call(self, meeting: _Meeting) -> None:
        """This begins in the loop's next turn: by then all have been told who are told together."""
        hall: Hall | None = None
        try:
            if self._sending is None or self._sending.done():
                hall = await self._sender.hall()
            else:
                self._note(f"version {meeting.weights.version} is not broadcast: the last broadcast is not over")
        except TrainerError as error:
            self._note(f"version {meeting.weights.version} is not broadcast: {error}")
        finally:
            if not meeting.members:  # all were given up meanwhile
                hall = None
            if hall is not None:
                self._number += 1
                call = Call(number=self._number, weights=meeting.weights, members=dict(meeting.members))
                self._sending = self._start(self._send(call))
            meeting.called.set_result(hall)

    async def _send(self, call: Call) -> None:
        try:
            await self._sender.broadcast(call)
        except TrainerError as error:
            self._note(f"the broadcast of version {call.weights.version} failed: {str(error).splitlines()[0]}")

    def _tell(self, loss: Loss) -> None:
        """Let the sender know, if it may be waiting."""
        if loss.number == self._number and self._sending is not None and not self._sending.done():
            self._start(self._lose(loss))

    async def _lose(self, loss: Loss) -> None:
        with contextlib.suppress(TrainerError):  # who does not answer will not wait for it either
            await self._sender.lose(loss)

    def _start(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class BroadcastEngine(ContinuingDeliveringEngine):
    """Implements `contracts.ContinuingEngine` by `engine`, the worker `name`, which takes weights by broadcast, or else
    as any other: from the file that `deliver` brings."""

    def __init__(self, name: str, engine: Receiving, deliver: Deliver, broadcasts: Broadcasts) -> None:
        super().__init__(engine, deliver)
        self._name = name
        self._member = f"{name}-{secrets.token_hex(4)}"  # another process may have had the name before
        self._receiving = engine
        self._broadcasts = broadcasts

    async def update_weights(self, weights: WeightFile, interrupt: Interrupt) -> WeightUpdate:
        invitation = await self._broadcasts.invite(self._member, self._receiving.seats, weights)
        if invitation is None:
            return await super().update_weights(weights, interrupt)
        try:
            update = await self._receiving.update_weights(weights, interrupt, invitation)
        except BaseException as error:
            refused = isinstance(error, RolloutError) and not isinstance(error, WorkerLostError)
            self._broadcasts.loss(invitation, self._name, str(error) if refused else "")
            if not refused:
                raise  # it is gone, or was given up meanwhile
        else:
            self._broadcasts.came()
            return update
        return await super().update_weights(weights, interrupt)
