"""One prompt's episode: sample the group's answers at the same time, score each as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from fleuve.config.settings import RolloutSettings
from fleuve.contracts import Remembering, Rewarder, RolloutError, Sampler
from fleuve.rollout.sampling import answer_seed, sampling_params
from fleuve.types import GenerationRequest, Prompt, Trajectory, Verdict


class SingleTurn:
    """Implements `contracts.Workflow`: `group_size` independent answers, each scored by the prompt's verifier."""

    def __init__(
        self, settings: RolloutSettings, seed: int, decode: Callable[[Sequence[int]], str], rewarder: Rewarder
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._decode = decode
        self._rewarder = rewarder

    async def run(self, engine: Sampler, prompt: Prompt, group: int) -> list[Trajectory]:
        memory = engine if isinstance(engine, Remembering) else None  # once: the check of a protocol takes its time
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [
                    tasks.create_task(self._answer(engine, memory, prompt, group, sample))
                    for sample in range(self._settings.group_size)
                ]
        except ExceptionGroup as errors:
            failed, faults = errors.split(RolloutError)
            if failed is None or faults is not None:
                raise
            raise failed.exceptions[0] from None
        return [answer.result() for answer in answers]

    async def _answer(
        self, engine: Sampler, memory: Remembering | None, prompt: Prompt, group: int, sample: int
    ) -> Trajectory:
        settings = self._settings
        completion = await engine.generate(
            GenerationRequest(
                request_id=f"{group}/{sample}",
                input_ids=prompt.input_ids,
                sampling=sampling_params(settings, settings.temperature, answer_seed(self._seed, prompt.id, sample)),
            )
        )
        if completion.finish_reason == "abort":
            raise RolloutError(f"request {completion.request_id} was aborted by the worker")
        text = self._decode(completion.output_ids)
        verdict = await self._judge(memory, completion.request_id, prompt, text)
        return Trajectory(
            prompt_ids=np.asarray(prompt.input_ids, np.int32),
            output_ids=np.asarray(completion.output_ids, np.int32),
            logprobs=np.asarray(completion.logprobs, np.float32),
            versions=np.asarray(completion.versions, np.int32),
            loss_mask=np.ones(len(completion.output_ids), np.bool_),
            finish_reason=completion.finish_reason,
            interruptions=completion.interruptions,
            reward=verdict.score,
            excluded=verdict.reason if verdict.score is None else "",
            text=text,
        )

    async def _judge(self, memory: Remembering | None, request_id: str, prompt: Prompt, text: str) -> Verdict:
        """The verdict that there is on this answer, or a new one."""
        known = memory.verdict(request_id) if memory else None
        if known is not None:
            return known
        verdict = await self._rewarder.score(prompt, text)
        if memory:
            memory.judged(request_id, verdict)
        return verdict
