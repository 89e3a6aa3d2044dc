"""A rollout worker that tells how far it has come, and goes on with what another has begun; not always truly."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fleuve.simulate.faulty_engine import FaultyEngine, tokens_of
from fleuve.simulate.ledger import logprob_of
from fleuve.simulate.lies import KINDS, PARTIAL
from fleuve.types import Progress


class ContinuingFaultyEngine(FaultyEngine):
    """Implements `contracts.ContinuingEngine` too."""

    async def progress(self, known: Mapping[str, int]) -> list[Progress]:
        await self._ask("progress")
        told = []
        for id, flight in self._flights.items():
            self._hold(flight)
            start = known.get(id, 0)
            versions, ids = flight.versions[start:], tokens_of(flight, flight.versions)[start:]
            reply = ids, list(map(logprob_of, ids)), versions
            if ids and self._chance.happens(self._case.rates.false_progress):
                reply = self.lie(reply, KINDS[self._chance.pick(PARTIAL)], 0)
                self._ledger.saw("false progress")
                if self._chance.pick(2):
                    self.die_within(0.5)
            progress = Progress(
                request_id=id,
                start=start,
                output_ids=np.asarray(reply[0], np.int32),
                logprobs=np.asarray(reply[1], np.float32),
                versions=np.asarray(reply[2], np.int32),
            )
            flight.told = flight.asked_at + len(flight.versions)
            if id in known and not flight.reply.done():
                told.append(progress)
        self._go_on()
        return told
