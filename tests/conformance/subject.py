"""The engine under test, with what it promises, and what the tests ask of it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from scorer import Scorer

from fleuve.contracts import RolloutEngine
from fleuve.types import Completion, GenerationRequest, Interrupt, SamplingParams, WeightFile, WeightUpdate
from fleuve.weights.store import WeightStore

FEATURES = {
    "same-seed": "the same seed gives the same answer whatever else is in the batch",
    "seeded-order": "an answer taken up by another engine goes on as the first would have",
    "stop-strings": "answers end at strings, not at token ids alone",
    "keep": "new weights can go on under the old KV cache",
    "finish": "an update can let the answers in flight end first",
    "update-while-paused": "new weights can be swapped in while nothing is computed",
    "weight-checks": "weights that are not whole are refused, and the old ones serve on",
}
"""What an engine may declare that it does without; everything else is the contract."""


@dataclass(frozen=True)
class Promise:
    """How near an engine's log-probabilities are to the trainer's: the mean absolute difference over an answer, and the
    largest of any token. What of `FEATURES` it `lacks`."""

    mean: float = 1e-4
    worst: float = 1e-4
    lacks: frozenset[str] = frozenset()


@dataclass
class Subject:
    """`version` is what the engine serves. Versions go up over the whole session: an engine never goes back."""

    engine: RolloutEngine
    scorer: Scorer
    store: WeightStore
    promise: Promise
    eos: frozenset[int]
    version: int = 0
    long: int = 160
    """Tokens of an answer that is still running when something else has happened."""
    published: dict[int, WeightFile] = field(default_factory=dict)
    _names: itertools.count[int] = field(default_factory=itertools.count)

    # --- requests ---------------------------------------------------------------------------------------------------

    def prompt(self, seed: int, length: int = 12) -> list[int]:
        """Tokens that are nothing special; the same for the same seed."""
        special = self.eos | {0, 1, 2}
        ordinary = [i for i in range(min(self.scorer.vocabulary, 4096)) if i not in special]
        return random.Random(seed).choices(ordinary, k=length)

    def ask(self, prompt: list[int], new: int = 20, name: str | None = None, **sampling: object) -> GenerationRequest:
        """A request whose answer runs to its full length unless it is told otherwise."""
        params = SamplingParams(max_new_tokens=new, **({"ignore_eos": True} | sampling))  # type: ignore[arg-type]
        return GenerationRequest(request_id=name or f"r{next(self._names)}", input_ids=prompt, sampling=params)

    async def generate(self, request: GenerationRequest) -> Completion:
        """One answer, whose arrays are lists here whatever the client makes of them."""
        answer = await self.engine.generate(request)
        return Completion(
            request_id=answer.request_id,
            output_ids=np.asarray(answer.output_ids, np.int32).tolist(),
            logprobs=np.asarray(answer.logprobs, np.float32).tolist(),
            versions=np.asarray(answer.versions, np.int32).tolist(),
            finish_reason=answer.finish_reason,
            interruptions=answer.interruptions,
        )

    async def answers(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """All at once."""
        async with asyncio.timeout(300):
            return list(await asyncio.gather(*(self.generate(r) for r in requests)))

    async def begin(self, *requests: GenerationRequest, tokens: int = 1) -> list[asyncio.Task[Completion]]:
        """The answers, in flight: `tokens` of all of them together have been sampled."""
        self.publish(self.version + 1)  # now, so that an update meets them soon
        before = (await self.engine.metrics())["tokens_generated"]
        tasks = [asyncio.create_task(self.generate(r)) for r in requests]
        await self.until(lambda m: m["tokens_generated"] >= before + tokens)
        return tasks

    async def until(self, holds: Callable[[dict[str, float]], bool]) -> None:
        """Wait for what the metrics of the engine are to show."""
        async with asyncio.timeout(60):
            while not holds(await self.engine.metrics()):  # noqa: ASYNC110 (it is another process's state)
                await asyncio.sleep(0.005)

    # --- weights ----------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> WeightFile:
        """Write the weights of `version`, once."""
        if version not in self.published:
            self.published[version] = self.store.publish(version, self.scorer.weights(version))
        return self.published[version]

    async def update(self, interrupt: Interrupt = "recompute", by: int = 1) -> WeightUpdate:
        """Bring the engine to the next version, or one further on."""
        file = self.publish(self.version + by)
        async with asyncio.timeout(120):
            done = await self.engine.update_weights(file, interrupt)
        assert done.version == file.version
        self.version = file.version
        return done

    # --- what is true of an answer ----------------------------------------------------------------------------------

    def needs(self, feature: str) -> None:
        """Skip the test where the engine declares that it lacks `feature`."""
        assert feature in FEATURES
        if feature in self.promise.lacks:
            pytest.skip(f"the engine declares that it does without: {FEATURES[feature]}")

    def well_formed(self, request: GenerationRequest, answer: Completion) -> None:
        """Its arrays are aligned, and its versions only go up, to none that is not there yet."""
        assert answer.request_id == request.request_id
        assert 0 < len(answer.output_ids) <= request.sampling.max_new_tokens
        assert len(answer.output_ids) == len(answer.logprobs) == len(answer.versions)
        assert list(answer.versions) == sorted(answer.versions)
        assert answer.versions[-1] <= self.version
        assert all(0 <= token < self.scorer.vocabulary for token in answer.output_ids)

    def near(self, got: Sequence[float], want: Sequence[float], what: str = "") -> None:
        """Log-probabilities agree as well as the engine promises."""
        difference = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))
        assert difference.mean() <= self.promise.mean, f"{what}: {difference.mean():.2g} on average"
        assert difference.max() <= self.promise.worst, f"{what}: {difference.max():.2g} at token {difference.argmax()}"

    def true(self, request: GenerationRequest, answer: Completion) -> None:
        """Each token's log-probability is what the trainer finds under the weights of that token's version, with
        everything before it computed by these weights too."""
        self.well_formed(request, answer)
        versions = np.asarray(answer.versions)
        for version in sorted(set(answer.versions)):
            own = versions == version
            want = self.scorer.logprobs(
                request.input_ids, list(answer.output_ids), version, request.sampling.temperature
            )
            self.near(np.asarray(answer.logprobs)[own], want[own], f"{request.request_id}, version {version}")  # type: ignore[arg-type]
