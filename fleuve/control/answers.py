"""The answers of running groups, so that a run which is continued neither samples nor scores again what it has.

An answer is written down when it ends, and once more, in a few bytes, when there is a verdict on it; a checkpoint also
keeps as much as is known of those that are being sampled. A group that runs again asks for them by its requests.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from fleuve.contracts import Sampler
from fleuve.control.begun import Begun
from fleuve.control.journal import Answer, Judged, Record
from fleuve.control.lease import Lease
from fleuve.types import Completion, GenerationRequest, Verdict


class Answers:
    """What is known of one group's."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._verdicts: dict[str, Judged] = {}

    def apply(self, record: Answer | Judged) -> None:
        """It has come to be known."""
        if isinstance(record, Judged):
            self._verdicts[record.request_id] = record
        else:
            self._answers[record.request_id] = record

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._answers.values())

    def to(self, request: GenerationRequest) -> Answer | None:
        """The one to that very request."""
        answer = self._answers.get(request.request_id)
        return answer if answer is not None and answer.asked == asked(request) else None

    def verdict(self, request_id: str) -> Verdict | None:
        """That on the answer to this request."""
        judged = self._verdicts.get(request_id)
        return None if judged is None else judged.verdict

    @property
    def ended(self) -> int:
        """How many are whole."""
        return sum(answer.finish_reason is not None for answer in self)

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return sum(len(answer.output_ids) for answer in self)

    @property
    def oldest_version(self) -> int | None:
        """Of their tokens; None without any."""
        return min((int(a.versions.min()) for a in self if len(a.versions)), default=None)

    @property
    def newest_version(self) -> int | None:
        """Of their tokens; None without any."""
        return max((int(a.versions.max()) for a in self if len(a.versions)), default=None)

    def records(self) -> list[Record]:
        """From which it can be had again."""
        return [*self._answers.values(), *self._verdicts.values()]


class Episode:
    """Implements `contracts.Remembering` for one group: an answer that is known is given, one that had begun goes on
    behind its tokens, and what is new is written down."""

    def __init__(self, group: int, answers: Answers, lease: Lease, write: Callable[[Record], None]) -> None:
        self._group = group
        self._answers = answers
        self._lease = lease
        self._write = write

    async def generate(self, request: GenerationRequest) -> Completion:
        """One answer; see `Lease.generate`."""
        known = self._answers.to(request)
        if known is None:
            completion = await self._lease.generate(request)
        elif known.finish_reason is not None:
            return _whole(known)
        else:
            room = len(known.output_ids) < request.sampling.max_new_tokens
            begun = Begun.of(known.output_ids, known.logprobs, known.versions) if room else None
            completion = await self._lease.generate(request, begun)
        if completion.finish_reason != "abort":
            self._keep(_answer(self._group, request, completion))
        return completion

    def verdict(self, request_id: str) -> Verdict | None:
        """See `contracts.Remembering`."""
        return self._answers.verdict(request_id)

    def judged(self, request_id: str, verdict: Verdict) -> None:
        """See `contracts.Remembering`."""
        self._keep(Judged(group=self._group, request_id=request_id, verdict=verdict))

    def records(self) -> list[Record]:
        """All that is known by now."""
        begun = [_begun(self._group, request, known) for request, known in self._lease.in_flight() if known]
        # A reader takes the last that is said of an answer.
        return [*self._answers.records(), *begun]

    def _keep(self, record: Answer | Judged) -> None:
        self._answers.apply(record)
        self._write(record)


class AnswerBook:
    """All running groups' answers. Without `write` nothing is kept: where no run is to be continued from them."""

    def __init__(self, write: Callable[[Record], None] | None, earlier: Mapping[int, Answers]) -> None:
        """`earlier`: what there was of groups that are to run again."""
        self._write = write
        self._earlier = dict(earlier)
        self._episodes: dict[int, Episode] = {}

    def left(self, group: int, answers: int) -> int:
        """How many of its `answers` are still to be sampled, at most."""
        earlier = self._earlier.get(group)
        return answers if earlier is None else max(answers - earlier.ended, 0)

    def open(self, group: int, lease: Lease) -> Sampler:
        """The group runs."""
        if self._write is None:
            return lease
        earlier = self._earlier.pop(group) if group in self._earlier else Answers()
        episode = Episode(group, earlier, lease, self._write)
        self._episodes[group] = episode
        return episode

    def close(self, group: int) -> None:
        """The group runs no more."""
        self._earlier.pop(group, None)
        self._episodes.pop(group, None)

    def records(self) -> list[Record]:
        """What a checkpoint keeps of it."""
        waiting = [record for answers in self._earlier.values() for record in answers.records()]
        return [*waiting, *(record for episode in self._episodes.values() for record in episode.records())]

    def summary(self) -> str:
        """What there was of earlier, in words; empty if there was nothing."""
        ended = sum(a.ended for a in self._earlier.values())
        tokens = sum(a.tokens for a in self._earlier.values())
        begun = sum(1 for answers in self._earlier.values() for _ in answers) - ended
        return f"{ended} answers of running groups are there, {begun} go on: {tokens} tokens" if tokens else ""


def asked(request: GenerationRequest) -> int:
    """A checksum of what the first tokens of an answer depend on, beside weights and settings: input and seed."""
    return zlib.crc32(array("i", request.input_ids).tobytes(), request.sampling.seed & 0xFFFFFFFF)


def _answer(group: int, request: GenerationRequest, completion: Completion) -> Answer:
    return Answer(
        group=group,
        request_id=request.request_id,
        asked=asked(request),
        output_ids=np.array(completion.output_ids, np.int32),
        logprobs=np.array(completion.logprobs, np.float32),
        versions=np.array(completion.versions, np.int32),
        finish_reason=completion.finish_reason,
        interruptions=completion.interruptions,
    )


def _begun(group: int, request: GenerationRequest, begun: Begun) -> Answer:
    ids, logprobs, versions = begun.arrays
    return Answer(
        group=group,
        request_id=request.request_id,
        asked=asked(request),
        output_ids=ids,
        logprobs=logprobs,
        versions=versions,
    )


def _whole(answer: Answer) -> Completion:
    assert answer.finish_reason is not None
    return Completion(
        request_id=answer.request_id,
        output_ids=answer.output_ids.tolist(),
        logprobs=answer.logprobs.tolist(),
        versions=answer.versions.tolist(),
        finish_reason=answer.finish_reason,
        interruptions=answer.interruptions,
    )
