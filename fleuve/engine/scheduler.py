"""Which sequences run, what each feeds in the next step, and who holds how much of the KV cache.

A pure state machine: no tensors, no clock, no tasks. `plan` decides one step; the caller carries out `plan.moves` on
the real cache in order, feeds `plan.chunks` to the model, and calls `fed`.

Rules, oldest request first throughout, so that the oldest always makes progress and nothing starves:
- a sequence holds a row of a capacity class (64, 128, 256, … tokens) and moves to the next when it outgrows it;
- when the token budget cannot pay for that, the youngest running sequence is preempted: it loses its row and waits
  again, keeping its tokens;
- one step prefills at most `prefill_tokens` tokens, beside one token for everything that decodes;
- of several sequences with the same prompt, one computes it and the others copy it, if the weights are still the same.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleuve.engine.sequence import Sequence

SMALLEST_CLASS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """`context`: the most positions of one sequence. `kv_cache_tokens`: the sum of all rows' capacities."""

    max_running: int
    kv_cache_tokens: int
    prefill_tokens: int
    context: int

    def capacity(self, tokens: int) -> int:
        """The smallest capacity class that holds `tokens`: a power of two times 64, or the whole context."""
        size = SMALLEST_CLASS
        while size < tokens:
            size *= 2
        return min(size, max(self.context, tokens))


@dataclass(frozen=True, slots=True)
class Resize:
    """Give the sequence a row of `capacity` tokens; `keep` of them come along from its old row."""

    sequence: Sequence
    capacity: int
    keep: int


@dataclass(frozen=True, slots=True)
class Release:
    """Take the sequence's row away."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `tokens` positions of the donor's row."""

    donor: Sequence
    sequence: Sequence
    tokens: int


Move = Resize | Release | Copy


@dataclass(frozen=True, slots=True)
class Chunk:
    """Feed `sequence.tokens[start : start + count]`; `samples` when that is all of them and the next is sampled."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class Plan:
    """One step: first the moves, in order, then the chunks in one forward pass."""

    moves: list[Move] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


class Scheduler:
    """See the module. `waiting` and `running` are sorted by arrival; `used` is the sum of the rows' capacities."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.used = 0
        self.preemptions = 0
        self._released: list[Move] = []
        self._by_prompt: defaultdict[tuple[int, ...], list[Sequence]] = defaultdict(list)

    def refusal(self, prompt_tokens: int, max_new_tokens: int) -> str | None:
        """Why a request of this size can never run, or None."""
        total = prompt_tokens + max_new_tokens
        if total > self.limits.context:
            return (
                f"prompt of {prompt_tokens} tokens + max_new_tokens {max_new_tokens} = {total}, "
                f"but the model's context is {self.limits.context}: at most "
                f"max_new_tokens {max(self.limits.context - prompt_tokens, 0)} with this prompt"
            )
        if self.limits.capacity(total - 1) > self.limits.kv_cache_tokens:
            return (
                f"prompt of {prompt_tokens} tokens + max_new_tokens {max_new_tokens} needs a KV cache row of "
                f"{self.limits.capacity(total - 1)} tokens, but kv_cache_tokens is {self.limits.kv_cache_tokens}"
            )
        return None

    def add(self, sequence: Sequence) -> None:
        """Queue a request that `refusal` found nothing against."""
        insort(self.waiting, sequence, key=lambda s: s.arrival)

    def reorder(self, key: Callable[[Sequence], Any]) -> None:
        """Take up the requests that have not begun in the order of `key` instead of their arrival."""
        fresh = [s for s in self.waiting if not s.num_output and not s.num_cached]
        arrivals = sorted(s.arrival for s in fresh)
        for sequence, arrival in zip(sorted(fresh, key=key), arrivals, strict=True):
            sequence.arrival = arrival
        self.waiting.sort(key=lambda s: s.arrival)

    def take_released(self) -> list[Move]:
        """The moves that give up the rows of requests that have ended; the next plan begins with them otherwise."""
        released, self._released = self._released, []
        return released

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out; its row is released by the next plan's first moves."""
        if sequence in self.running:
            self._leave(sequence, self._released)
        else:
            self.waiting.remove(sequence)

    def plan(self, version: int, admit_new: bool = True) -> Plan:
        """Decide the next step, under the weights of `version`.

        Args: `admit_new` False lets only those in that had already begun (an update waits for them to finish).
        """
        plan = Plan(moves=self.take_released())
        preempted = self._grow(plan.moves)
        budget = self.limits.prefill_tokens
        computing: set[tuple[int, ...]] = set()  # prompts that a sequence of this very step computes
        for sequence in self.running:
            budget -= self._feed(sequence, budget, version, computing, plan)
        if not preempted:
            self._admit(budget, version, admit_new, computing, plan)
        return plan

    def fed(self, plan: Plan, version: int) -> None:
        """Record that the plan's chunks went through the model with the weights of `version`."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if chunk.start == 0:
                sequence.prompt_version = version  # until the next update: `interrupt` forgets it
            sequence.num_cached = chunk.start + chunk.count

    def interrupt(self, drop_cache: bool) -> int:
        """A weight update meets everything in flight. Returns how many sequences that are."""
        in_flight = [s for s in (*self.running, *self.waiting) if s.num_cached or s.num_output]
        for sequence in in_flight:
            sequence.interruptions += 1
            sequence.prompt_version = None  # what is cached serves no one else from here on
            if drop_cache:
                sequence.drop_cache()
        return len(in_flight)

    @property
    def begun(self) -> int:
        """Sequences that must end before an update of kind `finish` can be made."""
        return len(self.running) + sum(1 for s in self.waiting if s.num_output)

    # --- the parts of a plan ----------------------------------------------------------------------------------------

    def _grow(self, moves: list[Move]) -> bool:
        """Rows big enough for every running sequence, preempting the youngest where the budget ends."""
        before = self.preemptions
        for sequence in tuple(self.running):
            if sequence.capacity == 0 or sequence.length <= sequence.capacity:
                continue  # just preempted, or roomy enough
            capacity = self.limits.capacity(sequence.length)
            while sequence.capacity and self.used + capacity - sequence.capacity > self.limits.kv_cache_tokens:
                self._preempt(self.running[-1], moves)
            if sequence.capacity:
                self._resize(sequence, capacity, moves)
        return self.preemptions > before

    def _feed(self, sequence: Sequence, budget: int, version: int, computing: set[tuple[int, ...]], plan: Plan) -> int:
        """Plan the sequence's next chunk, if any; returns the prefill tokens that it costs."""
        if sequence.pending == 1:
            plan.chunks.append(Chunk(sequence, sequence.num_cached, 1, samples=True))
            return 0
        if budget <= 0:
            return 0
        if sequence.num_cached == 0 and len(sequence.prompt) > 1:
            if sequence.prompt in computing:
                return 0  # the next step copies it
            donor, wait = self._donor(sequence, version)
            if wait:
                return 0
            if donor is not None:
                shared = len(sequence.prompt) - 1
                plan.moves.append(Copy(donor, sequence, shared))
                sequence.num_cached, sequence.prompt_version = shared, version
            else:
                computing.add(sequence.prompt)
        pending = sequence.pending
        count = 1 if pending == 1 else min(pending, budget)
        plan.chunks.append(Chunk(sequence, sequence.num_cached, count, samples=count == pending))
        return 0 if pending == 1 else count

    def _donor(self, sequence: Sequence, version: int) -> tuple[Sequence | None, bool]:
        """A running sequence to copy the prompt from, and whether to wait for one that is still computing it."""
        shared = len(sequence.prompt) - 1
        wait = False
        for other in self._by_prompt.get(sequence.prompt, ()):
            if other is sequence or other.prompt_version != version:
                continue
            if other.num_cached >= shared:
                return other, False
            wait = wait or other.num_cached > 0
        return None, wait

    def _admit(self, budget: int, version: int, admit_new: bool, computing: set[tuple[int, ...]], plan: Plan) -> None:
        """Let waiting sequences in, oldest first; one that will copy its prompt takes its place already."""
        for sequence in tuple(self.waiting):
            if budget <= 0 or len(self.running) >= self.limits.max_running:
                return
            if not admit_new and not sequence.num_output:
                continue
            capacity = self.limits.capacity(min(sequence.length + 1, sequence.max_length))
            if self.used + capacity > self.limits.kv_cache_tokens:
                return  # nobody overtakes: the oldest gets the room that comes free
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.arrival)
            self._by_prompt[sequence.prompt].append(sequence)
            self._resize(sequence, capacity, plan.moves)
            budget -= self._feed(sequence, budget, version, computing, plan)

    # --- rows -------------------------------------------------------------------------------------------------------

    def _resize(self, sequence: Sequence, capacity: int, moves: list[Move]) -> None:
        moves.append(Resize(sequence, capacity, sequence.num_cached))
        self.used += capacity - sequence.capacity
        sequence.capacity = capacity

    def _preempt(self, sequence: Sequence, moves: list[Move]) -> None:
        self._leave(sequence, moves)
        sequence.drop_cache()
        self.add(sequence)
        self.preemptions += 1

    def _leave(self, sequence: Sequence, moves: list[Move]) -> None:
        self.running.remove(sequence)
        siblings = self._by_prompt[sequence.prompt]
        siblings.remove(sequence)
        if not siblings:
            del self._by_prompt[sequence.prompt]
        moves.append(Release(sequence))
        self.used -= sequence.capacity
        sequence.capacity = 0
