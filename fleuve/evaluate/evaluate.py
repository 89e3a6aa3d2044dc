"""Scores a model on a set of problems: `samples` answers to each, by one version of the weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np

from fleuve.contracts import Rewarder, RolloutError
from fleuve.evaluate.answers import Answer, AnswerFile
from fleuve.evaluate.summary import EvaluationResult, MixedVersionsError, summarise
from fleuve.rollout.sampling import answer_seed
from fleuve.types import Completion, GenerationRequest, Prompt, SamplingParams

__all__ = ["EvaluationResult", "Generate", "MixedVersionsError", "evaluate", "part_of"]

Generate = Callable[[GenerationRequest], Awaitable[Completion]]


async def evaluate(
    generate: Generate,
    rewarder: Rewarder,
    decode: Callable[[Sequence[int]], str],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    samples: int = 1,
    seed: int = 0,
    concurrency: int = 128,
    label: str = "eval",
    output: Path | None = None,
    by: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Sample, score and count.

    Args:
        sampling: for all answers; its seed is replaced by one for each answer, the same in each evaluation with `seed`.
        concurrency: answers in flight at a time.
        label: begins the request ids, which must be unique in an engine.
        output: gets every answer and verdict, a JSON object a line, as they come.
        by: a field of the rows, for whose values the numbers are given too.
        progress: called with the answers done and all there are.

    Raises:
        MixedVersionsError: the answers are not all of one version.
        RolloutError: an engine failed or aborted an answer.
        OSError: `output` cannot be written.
    """
    room = asyncio.Semaphore(concurrency)
    done = 0

    async def answer(prompt: Prompt, sample: int) -> Answer:
        nonlocal done
        async with room:
            completion = await generate(
                GenerationRequest(
                    request_id=f"{label}/{prompt.id}/{sample}",
                    input_ids=prompt.input_ids,
                    sampling=msgspec.structs.replace(sampling, seed=answer_seed(seed, prompt.id, sample)),
                )
            )
        if completion.finish_reason == "abort":
            raise RolloutError(f"evaluation request {completion.request_id} was aborted by the worker")
        text = decode(completion.output_ids)
        verdict = await rewarder.score(prompt, text)
        scored = Answer(
            problem=prompt.id,
            sample=sample,
            prompt=prompt.text,
            reference=prompt.answer,
            text=text,
            verifier=prompt.verifier,
            score=verdict.score,
            reason=verdict.reason,
            tokens=len(completion.output_ids),
            finish_reason=completion.finish_reason,
            versions=np.unique(completion.versions).tolist(),
            part="" if by is None else part_of(prompt, by),
        )
        if file is not None:
            file.add(scored)
        done += 1
        if progress:
            progress(done, len(prompts) * samples)
        return scored

    with AnswerFile(output) if output is not None else nullcontext() as file:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(p, s)) for p in prompts for s in range(samples)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return summarise([task.result() for task in tasks], samples, by)


def part_of(prompt: Prompt, field: str) -> str:
    """What the row has in `field`, as text; "none" without it."""
    value = prompt.row.get(field, "none")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
