"""Evaluation inside a training run, by the run's own rollout workers, while they hold one version."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fleuve.config.settings import Settings
from fleuve.contracts import Rewarder
from fleuve.control.fleet import Fleet
from fleuve.data.open import PROCEDURAL, load_prompts
from fleuve.evaluate.evaluate import evaluate
from fleuve.modeling.tokenizer import answer_decoder
from fleuve.rollout.sampling import sampling_params
from fleuve.types import Completion, GenerationRequest


def in_run_evaluation(
    settings: Settings, tokenizer: Any, fleet: Fleet, rewarder: Rewarder
) -> Callable[[int], Awaitable[dict[str, float]]] | None:
    """What the controller calls with the version that the fleet serves; None without `data.eval` or
    `evaluate.every`. The problems and the random numbers are the same each time.

    Raises:
        UserError: `data.eval` cannot be read.
    """
    spec, how = settings.data.eval, settings.evaluate
    if spec is None or not how.every:
        return None
    prompts = load_prompts(spec, settings.data, tokenizer, how.problems)
    name = set_name(spec)
    rollout = settings.rollout
    sampling = sampling_params(rollout, how.temperature)

    async def generate(request: GenerationRequest) -> Completion:
        async with fleet.worker(1) as engine:
            return await engine.generate(request)

    async def run(version: int) -> dict[str, float]:
        result = await evaluate(
            generate,
            rewarder,
            answer_decoder(tokenizer),
            prompts,
            sampling,
            samples=how.samples,
            seed=settings.seed,
            concurrency=rollout.max_running * rollout.workers,
            label=f"eval/{version}",
        )
        return result.metrics(name)

    return run


def set_name(spec: str) -> str:
    """The `<set>` of `eval/<set>/pass@1`: a file's stem, or a generator's name."""
    if spec.startswith(PROCEDURAL):
        return spec.removeprefix(PROCEDURAL).partition("?")[0]
    return re.sub(r"[^\w.-]", "_", Path(spec).stem)
