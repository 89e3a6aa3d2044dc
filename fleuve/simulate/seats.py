"""Who runs on a simulated engine, who waits, and how many tokens their caches hold. A pure state machine, without a
clock; the rules are the embedded engine's scheduler's, in whole steps.

Oldest answer first. Every running answer samples one token in every step. When the caches are full the youngest is
preempted: it loses its cache and waits again, keeping its tokens. Nobody is admitted, and after a preemption nobody
stays, without room for a number of steps, so that the engine does not preempt in each of them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque
from dataclasses import dataclass, field

from fleuve.types import Completion, GenerationRequest, Int32Array

ADMIT_ROOM, PREEMPT_ROOM = 512, 64
"""Steps for which there must be room after an admission, and after a preemption. (SGLang 0.4 admits with room for
0.1 to 0.7 times min(remaining, 4096) tokens of each running answer, and preempts until there is room for 20.)"""


@dataclass(eq=False, slots=True)
class Answer:
    """One request on an engine. `length` tokens will be sampled, and it would be more if it were not `cut_off`; `done`
    were when it was last taken in, at the engine's step `joined`; `pieces` are the versions of those."""

    request: GenerationRequest
    reply: asyncio.Future[Completion]
    prompt: int
    length: int
    cut_off: bool
    arrival: int
    done: int = 0
    joined: int = 0
    running: bool = False
    stale: bool = False  # its cache has to be computed again
    interruptions: int = 0
    pieces: list[Int32Array] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Prompt and output, when it was last taken in."""
        return self.prompt + self.done

    @property
    def end(self) -> int:
        """The engine's step count when its last token is there, if nothing comes between."""
        return self.joined + self.length - self.done


@dataclass(frozen=True, slots=True)
class Work:
    """A prefill: `tokens` to compute, `again` of which were computed before, that attend to `pairs` of positions, for
    `fresh` answers that begin with it, and others."""

    tokens: int = 0
    again: int = 0
    pairs: float = 0.0
    fresh: int = 0


class Seats:
    """`steps` were taken so far; the caches of the `running` answers hold `kv` of `capacity` tokens."""

    def __init__(
        self, capacity: int, max_running: int, admit_room: int = ADMIT_ROOM, preempt_room: int = PREEMPT_ROOM
    ) -> None:
        self.capacity = capacity
        self.steps = 0
        self.kv = 0
        self.running: dict[Answer, None] = {}  # by arrival: whoever is let in is older than all who wait
        self.waiting: deque[Answer] = deque()
        self._max_running = max_running
        self._admit_room = admit_room
        self._preempt_room = preempt_room
        self._ends: list[tuple[int, int, Answer]] = []  # some have left since, or were taken in again
        self._stale = False  # some running answer is
        self._prompts: Counter[int] = Counter()  # how many running answers have the prompt in common

    def cached(self, answer: Answer) -> int:
        """Tokens in the cache of a running answer."""
        return answer.tokens + self.steps - answer.joined

    def sampled(self, answer: Answer) -> int:
        """Tokens of the answer so far."""
        return answer.done + (self.steps - answer.joined if answer.running else 0)

    @property
    def oldest_step(self) -> int:
        """Steps before this one are no longer anybody's."""
        return min((a.joined for a in self.running), default=self.steps)

    @property
    def begun(self) -> int:
        """Answers that must end before an update of kind `finish`: those that run, and those preempted."""
        return len(self.running) + sum(1 for a in self.waiting if a.done)

    @property
    def may_take_more(self) -> bool:
        """Whether an answer that arrives now could be next."""
        return not self.waiting and len(self.running) < self._max_running

    def admit(self, admit_new: bool = True) -> Work:
        """Let waiting answers in, oldest first, and say what has to be prefilled, for them and for stale caches.

        Args: `admit_new` False lets only those in that had begun.
        """
        tokens = again = fresh = 0
        pairs = 0.0
        stale: set[int] = set()
        if self._stale:
            self._stale = False
            for answer in [a for a in self.running if a.stale]:
                answer.stale = False
                shared = answer.prompt if id(answer.request.input_ids) in stale else 0
                stale.add(id(answer.request.input_ids))
                tokens, pairs = _add(tokens, pairs, shared, self.cached(answer))
        again = tokens
        while self.waiting and len(self.running) < self._max_running:
            answer = self.waiting[0]
            room = self.kv + answer.tokens + (len(self.running) + 1) * self._admit_room <= self.capacity
            if (self.running and not room) or not (admit_new or answer.done):
                break
            self.waiting.popleft()
            shared = answer.prompt if self._prompts[id(answer.request.input_ids)] else 0
            before = tokens
            tokens, pairs = _add(tokens, pairs, shared, answer.tokens)
            if answer.done:
                again += tokens - before
            fresh += not answer.interruptions and not answer.done
            self._take(answer)
        return Work(tokens, again, pairs, fresh)

    def advance(self, steps: int) -> None:
        """The running answers sampled a token each in `steps` steps."""
        self.steps += steps
        self.kv += steps * len(self.running)

    def steps_ahead(self) -> int:
        """Steps until an answer ends or the caches are full, whichever is first."""
        self._forget_outdated()
        return min(self._ends[0][0] - self.steps, (self.capacity - self.kv) // len(self.running))

    def pop_ended(self) -> list[Answer]:
        """The answers that have all their tokens leave."""
        ended: list[Answer] = []
        while True:
            self._forget_outdated()
            if not self._ends or self._ends[0][0] > self.steps:
                return ended
            answer = heapq.heappop(self._ends)[2]
            self._leave(answer)
            ended.append(answer)

    def preempt(self) -> list[Answer]:
        """Make room if the next step has none: these lost their caches, and wait at the head."""
        preempted: list[Answer] = []
        if self.kv + len(self.running) <= self.capacity:
            return preempted
        while len(self.running) > 1 and self.kv + len(self.running) * self._preempt_room > self.capacity:
            answer = next(reversed(self.running))
            self._leave(answer)
            answer.done += self.steps - answer.joined
            self.waiting.appendleft(answer)
            preempted.append(answer)
        return preempted

    def interrupt(self, drop_caches: bool) -> int:
        """New weights meet everything that has begun: how many answers that are."""
        met = [*self.running, *(a for a in self.waiting if a.done)]
        self._stale = self._stale or drop_caches
        for answer in met:
            answer.interruptions += 1
            answer.stale = answer.stale or (drop_caches and answer.running)
        return len(met)

    def remove(self, answer: Answer) -> None:
        """Take an answer out that will not be ended."""
        if answer.running:
            self._leave(answer)
        else:
            self.waiting.remove(answer)

    def _take(self, answer: Answer) -> None:
        answer.running, answer.joined = True, self.steps
        self.running[answer] = None
        self.kv += answer.tokens
        self._prompts[id(answer.request.input_ids)] += 1
        heapq.heappush(self._ends, (answer.end, answer.arrival, answer))

    def _leave(self, answer: Answer) -> None:
        self.kv -= self.cached(answer)
        answer.running = answer.stale = False
        del self.running[answer]
        key = id(answer.request.input_ids)
        self._prompts[key] -= 1
        if not self._prompts[key]:
            del self._prompts[key]

    def _forget_outdated(self) -> None:
        while self._ends and not (self._ends[0][2].running and self._ends[0][0] == self._ends[0][2].end):
            heapq.heappop(self._ends)


def _add(tokens: int, pairs: float, shared: int, length: int) -> tuple[int, float]:
    """A prefill of `tokens` and `pairs`, and a sequence of `length` more, of which `shared` are there already."""
    return tokens + length - shared, pairs + (length * length - shared * shared) / 2
