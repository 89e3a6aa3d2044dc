"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fleuve.types import Completion, FinishReason, GenerationRequest, Progress


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt, the answer so far, and how much of both the KV cache holds.

    `tokens` is prompt and answer together; a step feeds `tokens[num_cached:]` (or the start of it) to the model.
    Its first `given` answer tokens came with the request, from another engine.
    `capacity` is the size in tokens of the cache row it holds (0: none). `prompt_version` is the version whose weights
    computed every cached position; None when there is none, or when the weights have changed since.
    """

    request: GenerationRequest
    arrival: int
    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_cached: int = 0
    capacity: int = 0
    prompt_version: int | None = None
    given: int = 0
    interruptions: int = 0
    finish_reason: FinishReason | None = None
    stop_token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, request: GenerationRequest, arrival: int, eos: frozenset[int] = frozenset()) -> Sequence:
        """The sequence of a new request. `eos`: the model's own end tokens, unless the request ignores them."""
        stops = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops |= eos
        return cls(
            request=request,
            arrival=arrival,
            prompt=tuple(request.input_ids),
            tokens=[*request.input_ids, *request.output_ids],
            logprobs=[0.0] * len(request.output_ids),
            versions=[0] * len(request.output_ids),
            given=len(request.output_ids),
            stop_token_ids=stops,
        )

    @property
    def length(self) -> int:
        """Prompt and answer tokens."""
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens that the cache does not hold yet; when they are fed, the next one is sampled."""
        return len(self.tokens) - self.num_cached

    @property
    def num_output(self) -> int:
        """Answer tokens so far."""
        return len(self.logprobs)

    @property
    def max_length(self) -> int:
        """The most tokens it can ever hold in the cache: the last sampled one is never fed."""
        return len(self.prompt) + self.request.sampling.max_new_tokens - 1

    def append(self, token: int, logprob: float, version: int) -> None:
        """Record one sampled token, and whether it ends the answer (stop strings are the engine's matter)."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.logprobs) >= self.request.sampling.max_new_tokens:
            self.finish_reason = "length"

    def drop_cache(self) -> None:
        """Forget what the cache holds; the tokens, their log-probabilities and versions stay."""
        self.num_cached = 0
        self.prompt_version = None

    def progress(self, start: int) -> Progress:
        """What this engine has sampled beyond the `start` first tokens of its own."""
        at = self.given + start
        return Progress(
            request_id=self.request.request_id,
            start=start,
            output_ids=np.array(self.tokens[len(self.prompt) + at :], np.int32),
            logprobs=np.array(self.logprobs[at:], np.float32),
            versions=np.array(self.versions[at:], np.int32),
        )

    def completion(self) -> Completion:
        """The answer as the engine returns it: what it has sampled itself."""
        return Completion(
            request_id=self.request.request_id,
            output_ids=self.tokens[len(self.prompt) + self.given :],
            logprobs=self.logprobs[self.given :],
            versions=self.versions[self.given :],
            finish_reason=self.finish_reason or "abort",
            interruptions=self.interruptions,
        )
