"""What can be known to go wrong before any process starts: models, data, lengths, directories.

`fleuve check` is this and nothing else, and `fleuve train` begins with it. It imports neither torch nor transformers
and looks at no more than it can in a second: of a long data file as many rows as half a second allows, and of their
prompts the longest.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path

from fleuve.config.accelerator import no_gpu
from fleuve.config.algorithm_checks import algorithm_notes, algorithm_summary, group_size_problem
from fleuve.config.data_facts import DataFacts, inspect_data
from fleuve.config.launching import require_ray
from fleuve.config.light_tokenizer import LightTokenizer
from fleuve.config.lora import lora_notes, lora_problems, lora_summary
from fleuve.config.models import ModelFacts, inspect_model
from fleuve.config.problems import Problems
from fleuve.config.rank_checks import heads_problem, rank_notes
from fleuve.config.reward_checks import check_rewards
from fleuve.config.settings import DataSettings, Settings, SftSettings
from fleuve.config.side_models import context_problem, inspect_side_model, side_models
from fleuve.config.vllm_checks import vllm_heads_problem, vllm_notes, vllm_problems
from fleuve.engine.scheduler import Limits
from fleuve.errors import UserError
from fleuve.launch.placement import available_cpus
from fleuve.observe.rundir import run_directory_problem


def preflight(settings: Settings) -> list[str]:
    """Check everything that needs a look at the disk; returns what the run will be, a line each: `ok: ...`, and
    `note: ...` for what will run and yet may not be what was meant.

    Raises:
        UserError: one line a problem.
    """
    problems = Problems()
    if problem := run_directory_problem(settings.run_dir):
        problems.add(problem)
    for key, device in (("rollout.device", settings.rollout.device), ("trainer.device", settings.trainer.device)):
        # In a cluster, GPUs are on other nodes.
        if device == "cuda" and settings.launch.backend == "local" and (problem := no_gpu(key)):
            problems.add(problem)
    if settings.launch.backend == "ray":
        problems.catch(require_ray)
    if problem := group_size_problem(settings):
        problems.add(problem)
    problems.catch(lambda: check_instruction(settings.data))
    if settings.weights.path is not None and not Path(settings.weights.path).is_dir():
        problems.add(f"weights.path = {settings.weights.path}: no such directory")
    if settings.weights.transport == "broadcast" and not hasattr(os, "memfd_create"):
        problems.add('weights.transport = "broadcast" needs files without names, which this system has not (Linux has)')
    for problem in vllm_problems(settings):
        problems.add(problem)
    if settings.evaluate.every and settings.data.eval is None:
        problems.add(f"evaluate.every = {settings.evaluate.every} needs a data set to evaluate on, in data.eval")
    model: ModelFacts | None = problems.catch(lambda: inspect_model(settings.model.path))
    if problem := heads_problem(settings, model.directory if model else None):
        problems.add(problem)
    if problem := vllm_heads_problem(settings, model.directory if model else None):
        problems.add(problem)
    for problem in lora_problems(settings.lora, model):
        problems.add(problem)
    tokenizer: LightTokenizer | None = problems.catch(lambda: _tokenizer(model))
    train: DataFacts | None = problems.catch(lambda: inspect_data(settings.data.train, settings.data, tokenizer))
    evaluation: DataFacts | None = None
    if settings.data.eval is not None:
        path = settings.data.eval
        evaluation = problems.catch(lambda: inspect_data(path, settings.data, tokenizer))
    for data in (train, evaluation):
        if data is not None:
            for line in length_problems(settings, data, model.context if model else None):
                problems.add(line)
    scorers: list[str] | None = problems.catch(lambda: _scorers(settings, [d for d in (train, evaluation) if d]))
    _check_side_models(settings, model, train, problems)
    problems.raise_if_any()
    assert model is not None
    assert train is not None
    summary = [f"ok: {line}" for line in _summary(settings, model, train)]
    return summary + sorted(scorers or [], reverse=True) + [f"note: {n}" for n in _notes(settings, model)]


def _scorers(settings: Settings, data: list[DataFacts]) -> list[str]:
    """What will score the answers: `data.verifier`, and whom the rows name."""
    verifiers = {settings.data.verifier: "data.verifier"}
    for facts in data:
        for verifier, where in facts.verifiers.items():
            verifiers.setdefault(verifier, f"{where}: verifier")
    slowest = max((facts.slowest for facts in data), default=(0.0, ""))
    return check_rewards(settings.reward, verifiers, slowest)


def preflight_sft(settings: SftSettings) -> list[str]:
    """The same for a supervised run.

    Raises:
        UserError: one line a problem.
    """
    problems = Problems()
    path = settings.model.path
    model: ModelFacts | None = problems.catch(lambda: inspect_model(path)) if path is not None else None
    if settings.trainer.device == "cuda" and (problem := no_gpu("trainer.device")):
        problems.add(problem)
    problems.catch(lambda: check_instruction(settings.data))
    tokenizer: LightTokenizer | None = problems.catch(lambda: _tokenizer(model))
    data: DataFacts | None = problems.catch(
        lambda: inspect_data(settings.data.train, settings.data, tokenizer, settings.completion_field)
    )
    problems.raise_if_any()
    assert data is not None
    start = f"from {path}" if path is not None else "built anew"
    return [
        f"ok: model {start}, saved to {settings.model.save}",
        f"ok: data {settings.data.train}: {data}",
        f"ok: {settings.steps} steps of {settings.batch_size} demonstrations",
    ]


def _check_side_models(
    settings: Settings, policy: ModelFacts | None, train: DataFacts | None, problems: Problems
) -> None:
    """The reference and the critic's backbone, where they are used and not the policy's own."""
    prompt = (train.longest if train else None) or 1
    longest = prompt + settings.rollout.max_new_tokens
    for key, path in side_models(settings).items():
        facts: ModelFacts | None = problems.catch(partial(inspect_side_model, path, key, policy))
        if facts is None or policy is None:
            continue
        if problem := context_problem(key, path, facts, policy, longest):
            problems.add(problem)


def check_instruction(data: DataSettings) -> None:
    """Whether each prompt will hold its row's problem.

    Raises:
        UserError: `data.instruction` has no place for it.
    """
    if "{prompt}" in data.instruction:
        return
    near = re.search(r"\{\s*[A-Za-z_]\w*\s*\}", data.instruction)
    hint = f"; write {{prompt}} for {near[0]}" if near else "; write {prompt} where the problem goes"
    raise UserError(f"data.instruction holds no {{prompt}}, so no prompt would hold its problem{hint}")


def length_problems(settings: Settings, data: DataFacts, context: int | None) -> list[str]:
    """What is too small for the longest sequence: prompt and `max_new_tokens` together."""
    new = settings.rollout.max_new_tokens
    if context is not None and new >= context:
        return [f"rollout.max_new_tokens = {new} leaves no room for a prompt: the model's context is {context} tokens"]
    prompt = data.longest or 1
    need = prompt + new
    at = f" at {data.where}" if data.where else ""
    of = f"{need} tokens (a prompt of {prompt}{at}, and rollout.max_new_tokens = {new})"
    lines = []
    if context is not None and prompt >= context:
        return [f"the prompt{at} has {prompt} tokens; the model's context is {context}"]
    if context is not None and need > context:
        lines.append(
            f"the longest sequence has {of}; the model's context is {context}: "
            f"rollout.max_new_tokens can be {context - prompt} at most"
        )
    cache, budget = settings.rollout.kv_cache_tokens, settings.trainer.token_budget
    row = cache_row(need, context)
    if cache < row:
        why = f"whose row in the cache has {row} tokens; give it {row} or more"
        lines.append(f"rollout.kv_cache_tokens = {cache} is too small for the longest sequence of {of}, {why}")
    if budget < need:
        lines.append(
            f"trainer.token_budget = {budget} is too small for the longest sequence of {of}; give it {need} or more"
        )
    return lines


def cache_row(tokens: int, context: int | None) -> int:
    """What the engine's KV cache must hold for one whole sequence of `tokens`: rows come in classes of capacity."""
    limits = Limits(max_running=1, kv_cache_tokens=1, prefill_tokens=1, context=context or sys.maxsize)
    return limits.capacity(tokens - 1)  # the last token is sampled and never fed


def _tokenizer(model: ModelFacts | None) -> LightTokenizer | None:
    """The model's tokenizer; None if it has no `tokenizer.json`, which is all that can be read here."""
    if model is None or model.directory is None or not (model.directory / "tokenizer.json").exists():
        return None
    return LightTokenizer(model.directory)


def _notes(settings: Settings, model: ModelFacts) -> list[str]:
    """What is allowed and yet worth a second thought."""
    rollout = settings.rollout
    return [
        f"{key} = {value:g}: answers are sampled from a part of the distribution, and trained as if from all of it. "
        f"The behaviour weights make up for some of the difference; prefer {neutral}"
        for key, value, neutral in (("rollout.top_p", rollout.top_p, "1.0"), ("rollout.top_k", rollout.top_k, "0"))
        if value != float(neutral)
    ] + [
        *vllm_notes(settings),
        *lora_notes(settings.lora, model),
        *algorithm_notes(settings),
        *rank_notes(settings, len(available_cpus())),
    ]


def _summary(settings: Settings, model: ModelFacts, train: DataFacts) -> list[str]:
    control, rollout = settings.control, settings.rollout
    slots = (control.max_staleness + 1) * control.batch_size
    answers = control.batch_size * rollout.group_size
    if model.directory is None:
        about = "a hub name, fetched when the run starts; its context and the prompts' lengths are not checked"
    else:
        about = f"context {model.context or 'unbounded'}"
    versions = "1 version" if control.max_staleness == 1 else f"{control.max_staleness} versions"
    kind = "synchronous" if control.max_staleness == 0 else f"at most {versions} stale"
    workers = "1 rollout worker" if rollout.workers == 1 else f"{rollout.workers} rollout workers"
    return [
        f"model {settings.model.path}: {about}",
        f"data {settings.data.train}: {train}",
        f"{settings.steps} steps of {control.batch_size} groups × {rollout.group_size} answers = {answers} answers, "
        f"{settings.trainer.minibatches} minibatches each",
        *lora_summary(settings.lora),
        algorithm_summary(settings.algorithm),
        f"{slots} slots = ({control.max_staleness} + 1) × {control.batch_size}: {kind}, overdue: {control.overdue}",
        f"at most {answers * rollout.max_new_tokens:,} new tokens a step, {workers}, {settings.launch.placement}",
        f"the run goes to {settings.run_dir}",
    ]
