"""`fleuve eval MODEL DATA`: an engine process, the verifiers, and a table of the outcome."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fleuve.config.accelerator import no_gpu
from fleuve.config.loader import settings_from
from fleuve.config.models import inspect_model
from fleuve.config.nearest import did_you_mean, nearest
from fleuve.config.preflight import cache_row, check_instruction
from fleuve.config.reward_checks import check_rewards
from fleuve.config.settings import DataSettings, NonNegative, Positive, RewardSettings, RolloutSettings, Section
from fleuve.contracts import Rewarder
from fleuve.data.open import load_prompts
from fleuve.data.render import VERIFIER_FIELD
from fleuve.errors import UserError
from fleuve.evaluate.evaluate import EvaluationResult, evaluate, part_of
from fleuve.evaluate.in_run import set_name
from fleuve.launch.engines import start_engine
from fleuve.launch.host import Process
from fleuve.launch.placement import available_cpus
from fleuve.modeling.tokenizer import answer_decoder
from fleuve.rewards.open import open_rewarder
from fleuve.rollout.client import EngineClient
from fleuve.rollout.sampling import sampling_params
from fleuve.types import Prompt

MOST_PARTS = 100


class EvalSettings(Section):
    """What `fleuve eval` is asked. The data set is `data.eval`; `limit` None is all of it. `temperature` 0 is greedy;
    top-p, top-k, stop strings, `max_new_tokens` and the engine's sizes are `rollout`'s. `by` is a field of the rows."""

    model: str
    data: DataSettings
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    samples: Positive = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0
    limit: Positive | None = None
    seed: NonNegative = 0
    output: str | None = None
    by: str | None = None


def eval_settings(model: str, data: str, values: dict[str, Any], flags: Sequence[str] = ()) -> EvalSettings:
    """The settings from the command line: `values` are top-level settings and tables (None: not given), `flags`
    dotted words such as `--data.prompt_field question --rollout.max_new_tokens 512`.

    Raises:
        UserError: one line a mistake.
    """
    given: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    given |= {"model": model, "data": {"train": data, "eval": data, **given.get("data", {})}}
    settings = settings_from(EvalSettings, given, flags, "fleuve eval")
    if settings.samples > 1 and settings.temperature == 0:
        raise UserError(
            f"--samples {settings.samples} at temperature 0 gives the same answer {settings.samples} times: "
            "give --temperature too, such as --temperature 1"
        )
    return settings


def run_eval(settings: EvalSettings, progress: Callable[[int, int], None] | None = None) -> EvaluationResult:
    """Start an engine, sample, score, and end the engine; every answer goes to `settings.output`, if given.

    Raises:
        UserError: model, data or verifier cannot be used.
        ChildError: the engine died or did not start; RolloutError: it failed.
    """
    spec = settings.data.eval or settings.data.train
    check_instruction(settings.data)
    if settings.rollout.device == "cuda" and (problem := no_gpu("rollout.device")):
        raise UserError(problem)
    facts = inspect_model(settings.model, key="MODEL")
    if settings.output is not None:
        _check_writable(Path(settings.output))
    from fleuve.modeling.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(settings.model)
    prompts = load_prompts(spec, settings.data, tokenizer, settings.limit, settings.seed)
    for line in _scorers(prompts, settings):
        if not line.startswith("ok: "):
            print(line, file=sys.stderr)
    _check_lengths(prompts, settings, facts.context)
    if settings.by is not None:
        _check_parts(prompts, settings.by)
    return asyncio.run(_run(settings, tokenizer, prompts, progress))


def table(result: EvaluationResult, settings: EvalSettings) -> str:
    """The outcome in a few lines for people."""
    spec = settings.data.eval or settings.data.train
    lines = [f"{settings.model} on {set_name(spec)}: {result.problems} problems × {result.samples} answers"]
    if result.accuracy is None:
        lines.append("no answer has a verdict")
    else:
        lines.append(f"accuracy     {result.accuracy:.3f}   (95 % interval {result.low:.3f} to {result.high:.3f})")
    lines += [f"{f'pass@{k}':<12} {value:.3f}" for k, value in result.pass_at.items()]
    lines.append(f"mean length  {result.length_mean:.1f} tokens, {result.truncated:.1%} cut off")
    if result.no_verdict:
        lines.append(f"no verdict   {result.no_verdict} answers, left out of the above; the first: {result.why}")
    if result.parts:
        width = max(map(len, result.parts))
        lines += [f"  {label:<{width}}  {_part(part)}" for label, part in result.parts.items()]
    return "\n".join(lines)


def _part(part: EvaluationResult) -> str:
    """One line of the breakdown."""
    words = [f"{part.problems:>6} problems"]
    if part.accuracy is None:
        words.append("no answer has a verdict")
    else:
        words.append(f"accuracy {part.accuracy:.3f} ({part.low:.3f} to {part.high:.3f})")
    words += [f"pass@{k} {value:.3f}" for k, value in part.pass_at.items() if k > 1]
    words += [f"{part.no_verdict} without verdict"] if part.no_verdict else []
    return "   ".join(words)


def _scorers(prompts: Sequence[Prompt], settings: EvalSettings) -> list[str]:
    """See `check_rewards`, for the verifiers of these problems."""
    spec = settings.data.eval or settings.data.train
    verifiers = {p.verifier: f'{spec}: field "{VERIFIER_FIELD}"' for p in prompts if VERIFIER_FIELD in p.row}
    verifiers |= {p.verifier: "data.verifier" for p in prompts if VERIFIER_FIELD not in p.row}
    limits = [p.row.get("time_limit") for p in prompts]
    slowest = max((float(limit) for limit in limits if isinstance(limit, int | float)), default=0.0)
    return check_rewards(settings.reward, verifiers, (slowest, spec))


def _check_parts(prompts: Sequence[Prompt], by: str) -> None:
    """Whether the values of a field are few enough to be told apart in a table."""
    fields = dict.fromkeys(field for prompt in prompts for field in prompt.row)
    if by not in fields:
        match = nearest(by, fields)
        there = ", ".join(f'"{field}"' for field in fields)
        raise UserError(f'--by {by}: no row has a field "{by}"; there are {there}{did_you_mean(match)}')
    if (many := len({part_of(prompt, by) for prompt in prompts})) > MOST_PARTS:
        raise UserError(f"--by {by}: it has {many} different values, which is no breakdown; the most is {MOST_PARTS}")


def _check_writable(path: Path) -> None:
    """Before anything is sampled: an evaluation may take hours. What an earlier one has written is not lost to it."""
    if path.is_file() and path.stat().st_size:
        raise UserError(f"--output {path}: there are answers in it already; give another name, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written: {error.strerror}") from None


def _check_lengths(prompts: Sequence[Prompt], settings: EvalSettings, context: int | None) -> None:
    longest = max(len(prompt.input_ids) for prompt in prompts)
    need = longest + settings.rollout.max_new_tokens
    of = (
        f"the longest prompt has {longest} tokens; with rollout.max_new_tokens = "
        f"{settings.rollout.max_new_tokens} that is {need}"
    )
    if context is not None and need > context:
        raise UserError(f"{of}, more than the model's context of {context}")
    cache, row = settings.rollout.kv_cache_tokens, cache_row(need, context)
    if cache < row:
        raise UserError(
            f"{of}, whose row in the KV cache has {row} tokens; rollout.kv_cache_tokens = {cache} is too small: "
            f"give it {row} or more"
        )


async def _run(
    settings: EvalSettings, tokenizer: Any, prompts: Sequence[Prompt], progress: Callable[[int, int], None] | None
) -> EvaluationResult:
    rollout = settings.rollout
    threads = rollout.threads or len(available_cpus())
    sampling = sampling_params(rollout, settings.temperature)
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleuve-eval-")))
        verifiers = [p.verifier for p in prompts]
        rewards: Rewarder = await stack.enter_async_context(open_rewarder(settings.reward, verifiers))
        engine = await start_engine("engine", settings.model, rollout, logs / "engine.log", threads=threads)
        stack.push_async_callback(engine.stop)
        client = await stack.enter_async_context(
            EngineClient("engine", engine.url, rollout.request_timeout, rollout.update_timeout, engine.token)
        )
        evaluating = asyncio.create_task(
            evaluate(
                client.generate,
                rewards,
                answer_decoder(tokenizer),
                prompts,
                sampling,
                samples=settings.samples,
                seed=settings.seed,
                concurrency=rollout.max_running,
                output=Path(settings.output) if settings.output else None,
                by=settings.by,
                progress=progress,
            )
        )
        return await _or_death(evaluating, engine)


async def _or_death(evaluating: asyncio.Task[EvaluationResult], engine: Process) -> EvaluationResult:
    """The result; if the engine dies, its last words are the error, rather than the lost connections."""
    death = asyncio.create_task(engine.died())
    try:
        await asyncio.wait({evaluating, death}, return_when=asyncio.FIRST_COMPLETED)
        if not evaluating.done() or evaluating.exception() is not None:
            await asyncio.wait({death}, timeout=1.0)
        if death.done():
            raise death.result()
        return evaluating.result()
    finally:
        for task in (evaluating, death):
            task.cancel()
        await asyncio.gather(evaluating, death, return_exceptions=True)
