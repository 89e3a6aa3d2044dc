"""A group's hold on the fleet: its answers are sampled by one worker, and by another when that one is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.control.begun import Begun
from fleuve.control.replies import fault_of
from fleuve.control.router import Seat
from fleuve.control.worker import REMOVED, Life
from fleuve.types import Completion, GenerationRequest

if TYPE_CHECKING:
    from fleuve.control.fleet import Fleet


@dataclass(eq=False)
class _Flight:
    """One answer: `sent` went to `life`, which had the version `oldest`, with the tokens `begun`; `part` came since."""

    request: GenerationRequest
    begun: Begun
    attempt: int = 0
    sent: GenerationRequest | None = None
    life: Life | None = None
    oldest: int = 0
    part: Begun = field(default_factory=Begun)

    def board(self, life: Life) -> GenerationRequest:
        """What `life` is to be asked, at the `attempt`-th move. Under another name, should the worker be the same one,
        which only lost the connection and may not know that it did."""
        name = self.request.request_id
        request_id = f"{name}~{self.attempt}" if self.attempt else name
        sent = self.request
        if self.attempt or self.begun:
            sent = msgspec.structs.replace(sent, request_id=request_id, output_ids=self.begun.output_ids)
        self.sent, self.life, self.oldest, self.part = sent, life, life.version, Begun()
        life.begun[sent.request_id] = self.part
        return sent

    def leave(self) -> None:
        """`life` samples it no more."""
        assert self.life is not None
        assert self.sent is not None
        self.life.begun.pop(self.sent.request_id, None)

    def again(self, begun: Begun) -> None:
        """It is to be asked for once more, behind `begun`."""
        self.begun, self.part = begun, Begun()
        self.attempt += 1


class Lease:
    """Implements `contracts.Sampler` for one group of `answers`, whose slot and finished answers outlive a worker.

    The unfinished answers move together, so that their common prompt is computed once. They are the same requests with
    the same seeds, and go on behind the tokens that are known of them; without any, from the prompt. A group that loses
    `losses` workers may be what kills them: it fails then.
    """

    def __init__(self, fleet: Fleet, answers: int, losses: int) -> None:
        self._fleet = fleet
        self._unfinished = answers
        self._losses_left = losses
        self._seat: Seat[Life] | None = None
        self._flights: dict[str, _Flight] = {}

    async def generate(self, request: GenerationRequest, begun: Begun | None = None) -> Completion:
        """One answer, from whichever worker; `begun` is what an earlier life of the run had of it.

        Raises:
            RolloutError: the request itself failed on a worker that is well, or too many workers were lost.
        """
        flight = self._flights[request.request_id] = _Flight(request, begun or Begun())
        while True:
            life = await self._seated(request)
            one_version = self._fleet.policy.one_version
            if not life.continues or (one_version and flight.begun and flight.begun.newest != life.version):
                flight.begun = Begun()
            sent = flight.board(life)
            try:
                completion = await life.generate(sent)
                self._check(completion, sent, life, flight.oldest)
            except RolloutError as error:
                if not isinstance(error, WorkerLostError) and await self._fleet.well(life):
                    raise
                self._fleet.doubt(life)
                self._move_from(life, error)
                self._keep(flight)
            else:
                if one_version and flight.begun and flight.begun.newest not in completion.versions:
                    flight.again(Begun())  # an update came in between: once more, from the prompt
                    continue
                completion.request_id = request.request_id
                self._end(flight, len(completion.output_ids))
                return flight.begun.ended(completion)
            finally:
                flight.leave()

    def in_flight(self) -> Iterator[tuple[GenerationRequest, Begun]]:
        """The answers in flight when the group was last heard of, with what is known of them: a second old at most."""
        for flight in self._flights.values():
            yield flight.request, self._known(flight)

    def _keep(self, flight: _Flight) -> None:
        """An answer moves on, behind what is known of it."""
        known = self._known(flight)
        self._fleet.moved += 1
        self._fleet.kept += len(known) - len(flight.begun)
        flight.again(known)

    def _known(self, flight: _Flight) -> Begun:
        """What had begun of an answer, and behind it what the worker has sampled since, as far as that is known and can
        be: not if it cannot be true, nor if it leaves no room, nor of another version where an answer has but one."""
        begun, part, fleet = flight.begun, flight.part, self._fleet
        if not part or flight.sent is None or flight.life is None or flight.life.distrusted:
            return begun
        if len(part) >= flight.sent.sampling.max_new_tokens - len(begun):
            return begun
        if fleet.policy.one_version and begun and part.newest != begun.newest:
            return begun
        answer = part.cut_off(flight.sent.request_id)
        fault = fault_of(answer, flight.sent, flight.oldest, fleet.newest_version, fleet.vocabulary)
        return begun if fault else begun.and_then(part)

    def _check(self, completion: Completion, request: GenerationRequest, life: Life, oldest: int) -> None:
        """A worker that hands in what no model of this run can have sampled is given up, and nothing of it is taken.

        Raises:
            WorkerLostError: it did.
        """
        fleet = self._fleet
        if fault := fault_of(completion, request, oldest, fleet.newest_version, fleet.vocabulary):
            life.distrusted = True
            fleet.lose(life, f"its answer to {request.request_id} cannot be: {fault}")
            raise WorkerLostError(f"{life.name}: {request.request_id}: {fault}")

    def release(self) -> None:
        """The group is done, well or badly."""
        if self._seat is not None:
            self._fleet.router.give_back(self._seat, self._seat.answers)
            self._seat = None

    async def _seated(self, request: GenerationRequest) -> Life:
        """The worker that the group is on; takes one, and waits until there is one."""
        while self._seat is None:
            await self._fleet.open()
            if self._seat is None:  # another answer of the group was woken first
                length = self._fleet.lengths.of(request.sampling.max_new_tokens)
                self._seat = self._fleet.router.take(self._to_come, len(request.input_ids) + length)
        if len(self._flights) > self._seat.answers:  # a turn beyond those that were announced
            self._fleet.router.add(self._seat, 1)
        return self._seat.worker

    @property
    def _to_come(self) -> int:
        """Answers in flight or still to be asked for."""
        return max(self._unfinished, len(self._flights))

    def _end(self, flight: _Flight, tokens: int) -> None:
        """An answer is whole, with `tokens` more: it weighs on the worker no longer."""
        del self._flights[flight.request.request_id]
        self._unfinished = max(self._unfinished - 1, 0)
        self._fleet.lengths.ended(len(flight.begun) + tokens)
        if self._seat is not None and self._seat.answers > self._to_come:
            self._fleet.router.give_back(self._seat, 1)

    def _move_from(self, life: Life, error: RolloutError) -> None:
        """Leave `life`, if no other answer of the group did so already.

        Raises:
            RolloutError: `error`, when this is one worker too many.
        """
        if self._seat is None or self._seat.worker is not life:
            return
        if life.over != REMOVED:
            self._losses_left -= 1
        if self._losses_left <= 0:
            raise error
        self.release()
