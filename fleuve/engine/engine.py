"""The engine without its thread and its server: requests in, one step at a time, answers out.

Everything here happens on one thread, between or in steps, so a weight update is atomic: no forward pass mixes two
versions, and once `update` has been carried out no token of an older one is sampled.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fleuve.engine.detokenizer import Detokenizer
from fleuve.engine.parameters import Parameters
from fleuve.engine.runner import Runner
from fleuve.engine.scheduler import Limits, Scheduler
from fleuve.engine.sequence import Sequence
from fleuve.types import Completion, GenerationRequest, Interrupt, Progress, WeightUpdate

MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters: every token of an answer is compared with every beginning of every stop string


class RequestError(ValueError):
    """A request that this engine cannot serve: one line, the client's to mend."""


class NotFiniteError(RuntimeError):
    """The model's logits were not numbers: the weights are broken."""


@dataclass(eq=False, slots=True)
class Update:
    """New weights waiting for their moment. `tensors` have passed `Parameters.check`."""

    version: int
    tensors: dict[str, Tensor]
    interrupt: Interrupt
    result: WeightUpdate | None = None


@dataclass(slots=True)
class Outcome:
    """What one step did: tokens sampled (for streams), requests that ended, updates carried out."""

    sampled: list[tuple[str, int, float]] = field(default_factory=list)
    ended: list[Completion | tuple[str, Exception]] = field(default_factory=list)
    updated: list[Update] = field(default_factory=list)


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts `2/10` after `2/9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


class Engine:
    """Args: `model` with the attention of `modeling.attention`; `tokenizer`: only stop strings need it; `eos`: the
    token ids that end an answer."""

    def __init__(
        self, model: torch.nn.Module, limits: Limits, *, tokenizer: Any = None, eos: Seq[int] = (), version: int = 0
    ) -> None:
        self.version = version
        self.tokenizer = tokenizer
        self.eos = frozenset(eos)
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self.parameters = Parameters(model)
        self.scheduler = Scheduler(limits)
        self.runner = Runner(model)
        self._sequences: dict[str, Sequence] = {}
        self._texts: dict[Sequence, Detokenizer] = {}
        self._updates: deque[Update] = deque()
        self._arrivals = 0
        self._poisoned = False
        self._tokens_generated = 0
        self._tokens_prefilled = 0
        self._interrupted = 0
        self._steps = 0
        self._busy = 0.0

    # --- requests ---------------------------------------------------------------------------------------------------

    def check(self, request: GenerationRequest) -> None:
        """Raises:
        RequestError: the request can never be served as it is.
        """
        sampling, prompt = request.sampling, request.input_ids
        if not prompt:
            raise RequestError("input_ids is empty: give at least one token")
        if sampling.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {sampling.max_new_tokens}: it must be at least 1")
        if not (0 <= sampling.temperature < math.inf):
            raise RequestError(f"temperature is {sampling.temperature}: it must be 0 (greedy) or positive")
        if not 0 < sampling.top_p <= 1:
            raise RequestError(f"top_p is {sampling.top_p}: it must be above 0 and at most 1")
        if sampling.top_k < 0:
            raise RequestError(f"top_k is {sampling.top_k}: it must be 0 (off) or positive")
        if len(sampling.stop) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in sampling.stop):
            raise RequestError(f"stop may be {MAX_STOPS} strings of {MAX_STOP_LENGTH} characters at most")
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        if (refusal := self.scheduler.refusal(len(prompt), sampling.max_new_tokens)) is not None:
            raise RequestError(refusal)
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            raise RequestError(f"input_ids outside the model's vocabulary of {self.vocabulary} tokens")
        if request.output_ids:
            self._check_given(request.output_ids, sampling.max_new_tokens)

    def _check_given(self, tokens: list[int], most: int) -> None:
        if len(tokens) >= most:
            raise RequestError(f"output_ids has {len(tokens)} tokens, and max_new_tokens is {most}: nothing is left")
        if min(tokens) < 0 or max(tokens) >= self.vocabulary:
            raise RequestError(f"output_ids outside the model's vocabulary of {self.vocabulary} tokens")

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served, or its `request_id` is in use.
        """
        self.check(request)
        if request.request_id in self._sequences:
            raise RequestError(f"request_id {request.request_id!r} is already in use")
        self._arrivals += 1
        sequence = Sequence.of(request, self._arrivals, self.eos)
        self._sequences[request.request_id] = sequence
        if request.sampling.stop:
            self._texts[sequence] = text = Detokenizer(self.tokenizer, sequence.prompt, request.sampling.stop)
            for token in request.output_ids:
                text.push(token)
        self.scheduler.add(sequence)

    def settle(self) -> None:
        """Leave nothing to chance that a pause can take out of it: requests that have come since and have not begun are
        taken up in the order of their ids, whenever each arrived; rows of answers that have ended are free."""
        self.scheduler.reorder(lambda s: natural(s.request.request_id.partition(":")[2]))
        self.runner.move(self.scheduler.take_released())

    def abort(self, request_ids: Seq[str]) -> list[Completion]:
        """End these requests now; unknown ids are passed over. Returns what each has so far."""
        found = [s for i in dict.fromkeys(request_ids) if (s := self._sequences.get(i)) is not None]
        for sequence in found:
            sequence.finish_reason = "abort"
            self._forget(sequence)
        return [s.completion() for s in found]

    def progress(self, known: Mapping[str, int]) -> list[Progress]:
        """What has come of these requests beyond the tokens known of each; those not in flight are left out."""
        found = [(s, start) for i, start in known.items() if (s := self._sequences.get(i)) is not None]
        return [s.progress(max(start, 0)) for s, start in found]

    def request_update(self, update: Update) -> None:
        """Have the weights swapped before a coming step (`Outcome.updated` says when it is done)."""
        self._updates.append(update)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._sequences and not self._updates

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> Outcome:
        """Swap weights if it is time, feed one packed batch, sample, and end what is finished."""
        started = time.perf_counter()
        outcome = Outcome()
        self.apply_updates(outcome)
        version = self.version
        plan = self.scheduler.plan(version, admit_new=not self._updates)
        for sequence, token, logprob in self.runner.run(plan):
            if math.isnan(logprob):
                error = NotFiniteError(f"logits are not finite under the weights of version {version}")
                self._poisoned = True
                outcome.ended.append((sequence.request.request_id, error))
                self._forget(sequence)
                continue
            sequence.append(token, logprob, version)
            outcome.sampled.append((sequence.request.request_id, token, logprob))
            if sequence in self._texts:
                self._texts[sequence].push(token)
                if self._texts[sequence].stopped:
                    sequence.finish_reason = "stop"
        self.scheduler.fed(plan, version)
        for request_id, _, _ in outcome.sampled:
            sequence = self._sequences[request_id]
            if sequence.finish_reason is not None:
                outcome.ended.append(sequence.completion())
                self._forget(sequence)
        self._tokens_generated += len(outcome.sampled)
        self._tokens_prefilled += sum(c.count for c in plan.chunks if c.count > 1)
        self._steps += 1
        self._busy += time.perf_counter() - started
        return outcome

    def apply_updates(self, outcome: Outcome) -> None:
        """Swap in the weights whose moment has come; `step` does this itself, a paused engine needs it alone."""
        while self._updates:
            update = self._updates[0]
            if update.interrupt == "finish" and self.scheduler.begun and update.version > self.version:
                return
            self._updates.popleft()
            update.result = self._swap(update)
            outcome.updated.append(update)

    def _swap(self, update: Update) -> WeightUpdate:
        started = time.perf_counter()
        if update.version < self.version:  # superseded on the way: acknowledged with what there is
            return WeightUpdate(version=self.version, interrupted=0, seconds=0.0)
        self.parameters.load(update.tensors)
        interrupted = self.scheduler.interrupt(drop_cache=update.interrupt != "keep" or self._poisoned)
        if self._poisoned:
            self.runner.cache.clear()
            self._poisoned = False
        self.version = update.version
        self._interrupted += interrupted
        return WeightUpdate(version=update.version, interrupted=interrupted, seconds=time.perf_counter() - started)

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self._texts.pop(sequence, None)
        del self._sequences[sequence.request.request_id]

    def metrics(self) -> dict[str, float]:
        """Counters since the start and the state of this moment."""
        scheduler = self.scheduler
        return {
            "version": self.version,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_cache_tokens_reserved": scheduler.used,
            "kv_cache_tokens_used": sum(s.num_cached for s in scheduler.running),
            "kv_cache_use": scheduler.used / scheduler.limits.kv_cache_tokens,
            "tokens_generated": self._tokens_generated,
            "tokens_prefilled": self._tokens_prefilled,
            "interrupted": self._interrupted,
            "preemptions": scheduler.preemptions,
            "steps": self._steps,
            "busy_seconds": self._busy,
        }
