"""Scores a model on a set of problems: `samples` answers to each, by one version of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from fleuve.contracts import Rewarder, RolloutError
from fleuve.evaluate.statistics import mean_with_interval, pass_at_k, reported_k
from fleuve.rollout.sampling import answer_seed
from fleuve.types import Completion, FinishReason, GenerationRequest, Prompt, SamplingParams

SOLVED = 0.5
"""An answer with a score above this counts as solved, as in training."""

Generate = Callable[[GenerationRequest], Awaitable[Completion]]


class MixedVersionsError(RuntimeError):
    """Weights were updated during an evaluation: its number would be no version's."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer and its verdict: a line of the evaluation's JSONL file. `tokens` counts the answer's."""

    problem: str
    sample: int
    prompt: str
    reference: str
    text: str
    score: float | None
    reason: str
    tokens: int
    finish_reason: FinishReason
    versions: list[int]


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """`accuracy` is the fraction solved (the mean over problems of the mean over their answers with a verdict), `low`
    and `high` its 95 % confidence interval; None if no answer has a verdict. `pass_at[k]` is the mean over the problems
    with k verdicts or more. `length_mean` is in tokens, `truncated` a fraction. `version` is None if nothing was
    sampled."""

    problems: int
    samples: int
    accuracy: float | None
    low: float | None
    high: float | None
    pass_at: dict[int, float]
    score_mean: float | None
    length_mean: float
    truncated: float
    no_verdict: int
    version: int | None

    def metrics(self, name: str) -> dict[str, float]:
        """As `eval/<name>/...`."""
        values = {f"pass@{k}": value for k, value in self.pass_at.items()}
        optional = {"low": self.low, "high": self.high, "score_mean": self.score_mean}
        values |= {key: value for key, value in optional.items() if value is not None}
        values |= {"length_mean": self.length_mean, "truncated": self.truncated, "no_verdict": float(self.no_verdict)}
        return {f"eval/{name}/{key}": value for key, value in values.items()}


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
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Sample, score and count.

    Args:
        sampling: for all answers; its seed is replaced by one for each answer, the same in each evaluation with `seed`.
        concurrency: answers in flight at a time.
        label: begins the request ids, which must be unique in an engine.
        output: gets every answer and verdict, a JSON object a line, in the order of `prompts`.
        progress: called with the answers done and all there are.

    Raises:
        MixedVersionsError: the answers are not all of one version.
        RolloutError: an engine failed or aborted an answer.
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
        done += 1
        if progress:
            progress(done, len(prompts) * samples)
        return Answer(
            problem=prompt.id,
            sample=sample,
            prompt=prompt.text,
            reference=prompt.answer,
            text=text,
            score=verdict.score,
            reason=verdict.reason,
            tokens=len(completion.output_ids),
            finish_reason=completion.finish_reason,
            versions=sorted(set(completion.versions)),
        )

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(p, s)) for p in prompts for s in range(samples)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    answers = [task.result() for task in tasks]
    if output is not None:
        await asyncio.to_thread(_write, output, answers)
    return summarise(answers, samples)


def summarise(answers: Sequence[Answer], samples: int) -> EvaluationResult:
    """Count the answers, `samples` in a row for each problem.

    Raises:
        MixedVersionsError: they are not all of one version.
    """
    versions = {v for a in answers for v in a.versions}
    if len(versions) > 1:
        raise MixedVersionsError(f"an evaluation met weights of versions {', '.join(map(str, sorted(versions)))}")
    problems = [answers[i : i + samples] for i in range(0, len(answers), samples)]
    # Answers without a verdict are left out, not counted as wrong.
    counts: list[tuple[int, int]] = []
    for problem in problems:
        scores = [a.score for a in problem if a.score is not None]
        if scores:
            counts.append((len(scores), sum(score > SOLVED for score in scores)))
    scores = [a.score for a in answers if a.score is not None]
    accuracy, low, high = mean_with_interval([c / n for n, c in counts]) if counts else (None, None, None)
    pass_at = {}
    for k in reported_k(samples):
        values = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        if values:
            pass_at[k] = sum(values) / len(values)
    return EvaluationResult(
        problems=len(problems),
        samples=samples,
        accuracy=accuracy,
        low=low,
        high=high,
        pass_at=pass_at,
        score_mean=sum(scores) / len(scores) if scores else None,
        length_mean=sum(a.tokens for a in answers) / max(1, len(answers)),
        truncated=sum(a.finish_reason == "length" for a in answers) / max(1, len(answers)),
        no_verdict=len(answers) - len(scores),
        version=min(versions, default=None),
    )


def _write(path: Path, answers: Sequence[Answer]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for answer in answers:
            file.write(msgspec.json.encode(answer) + b"\n")
