"""A group's hold on the fleet: its answers are sampled by one worker, and by another when that one is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.control.begun import Begun
from fleuve.control.replies import fault_of
from fleuve.control.worker import Life
from fleuve.types import Completion, GenerationRequest

if TYPE_CHECKING:
    from fleuve.control.fleet import Fleet


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
        self._life: Life | None = None
        self._counted = 0  # answers that the router counts for this group

    async def generate(self, request: GenerationRequest) -> Completion:
        """One answer, from whichever worker.

        Raises:
            RolloutError: the request itself failed on a worker that is well, or too many workers were lost.
        """
        attempt, begun = 0, Begun()
        while True:
            life = await self._seat()
            one_version = self._fleet.policy.one_version
            if not life.continues or (one_version and begun and begun.newest != life.version):
                begun = Begun()
            sent = _sent(request, attempt, begun)
            oldest = life.version
            life.begun[sent.request_id] = part = Begun()
            try:
                completion = await life.generate(sent)
                self._check(completion, sent, life, oldest)
            except RolloutError as error:
                if not isinstance(error, WorkerLostError) and await self._fleet.well(life):
                    raise
                self._fleet.doubt(life)
                self._move_from(life, error)
                self._keep(begun, part, sent, life, oldest)
                attempt += 1
            else:
                if one_version and begun and begun.newest not in completion.versions:
                    begun, attempt = Begun(), attempt + 1  # an update came in between: once more, from the prompt
                    continue
                self._unfinished -= 1
                completion.request_id = request.request_id
                return begun.ended(completion)
            finally:
                life.begun.pop(sent.request_id, None)

    def _keep(self, begun: Begun, part: Begun, sent: GenerationRequest, life: Life, oldest: int) -> None:
        """An answer moves on: put what `life` had sampled of it, as far as it is known and can be, behind `begun`."""
        fleet = self._fleet
        fleet.moved += 1
        answer = part.cut_off(sent.request_id)
        fault = fault_of(answer, sent, oldest, fleet.newest_version, fleet.vocabulary)
        room = sent.sampling.max_new_tokens - len(begun)
        if not life.distrusted and not fault and len(part) < room:
            begun.follow(part)
            fleet.kept += len(part)

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
        if self._life is not None:
            self._fleet.router.give_back(self._life, self._counted)
            self._life = None

    async def _seat(self) -> Life:
        """The worker that the group is on; takes one, and waits until there is one."""
        while self._life is None:
            await self._fleet.open()
            if self._life is None:  # another answer of the group was woken first
                self._counted = max(self._unfinished, 1)
                self._life = self._fleet.router.take(self._counted)
        return self._life

    def _move_from(self, life: Life, error: RolloutError) -> None:
        """Leave `life`, if no other answer of the group did so already.

        Raises:
            RolloutError: `error`, when this is one worker too many.
        """
        if self._life is not life:
            return
        if not self._fleet.left_on_purpose(life):
            self._losses_left -= 1
        if self._losses_left <= 0:
            raise error
        self.release()


def _sent(request: GenerationRequest, attempt: int, begun: Begun) -> GenerationRequest:
    """What a worker is asked at the `attempt`-th move. Under another name, should the worker be the same one, which
    only lost the connection and may not know that it did."""
    if not attempt:
        return request
    request_id = f"{request.request_id}~{attempt}"
    return msgspec.structs.replace(request, request_id=request_id, output_ids=begun.output_ids)
