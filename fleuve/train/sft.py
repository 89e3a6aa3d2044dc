"""The supervised start: learn completions by heart, on the same packed model code that reinforcement uses."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from fleuve.config.settings import SftSettings
from fleuve.contracts import RunError
from fleuve.data.open import open_demonstrations
from fleuve.errors import UserError
from fleuve.modeling.char_tokenizer import build_char_tokenizer
from fleuve.modeling.loading import DTYPES, build_model, load_model, pick_device, resolve_model
from fleuve.modeling.tokenizer import load_tokenizer
from fleuve.observe.rundir import RunDirectory
from fleuve.train.checkpoint import save_model
from fleuve.train.microbatch import Sample, make_micro_batches
from fleuve.train.optimizer import MasterOptimizer
from fleuve.train.policy import Policy

Log = Callable[[dict[str, float]], None]


class SftRow(NamedTuple):
    """One demonstration, tokenised. The end-of-sequence token is not in it: it is appended here."""

    prompt_ids: list[int]
    completion_ids: list[int]


def run_sft(settings: SftSettings, rows: Iterable[SftRow] | None = None, log: Log | None = None) -> Path:
    """Train on `rows` for `settings.steps` steps of `settings.batch_size`, and save the model; returns where.

    The loss is the mean cross-entropy of a batch's completion tokens (the end-of-sequence token among them); the
    learning rate warms up linearly and falls to zero along a cosine. Same settings, same rows: same model.

    Args:
        rows: as many as there are, endless if possible; None reads `settings.data`, shuffled anew each time round.
        log: gets each step's metrics; None prints them now and then and appends them to `metrics.jsonl` in the run
            directory.

    Raises:
        UserError: a row is longer than `trainer.token_budget`, there are too few rows, the model cannot be built, or
            another run writes into the run directory.
        RunError: `trainer.max_nonfinite_in_a_row` updates in a row could not be made.
    """
    disable_progress_bar()
    trainer = settings.trainer
    save_to = Path(settings.model.save)
    if save_to.exists() and not (save_to / "config.json").exists():
        raise UserError(f"model.save = {save_to} exists and is no model directory; choose another")
    torch.manual_seed(settings.seed)
    device = pick_device(trainer.device)
    tokenizer, model = _open_model(settings)
    model = model.to(device)
    if rows is None:
        rows = (SftRow(*ids) for ids in open_demonstrations(settings, tokenizer))
    optimizer = MasterOptimizer(
        model,
        DTYPES[trainer.dtype],
        betas=(trainer.beta1, trainer.beta2),
        eps=trainer.eps,
        weight_decay=trainer.weight_decay,
    )
    policy = Policy(model, 1.0, trainer.logprob_chunk, trainer.activation_checkpointing)
    run = RunDirectory(settings.run_dir)
    if log is None:
        run.root.mkdir(parents=True, exist_ok=True)
        run.lock()
        log = _default_log(run, settings.steps)
    try:
        in_a_row = 0
        samples = (_sample(row, tokenizer.eos_token_id, trainer.token_budget) for row in rows)
        for step in range(settings.steps):
            batch = list(itertools.islice(samples, settings.batch_size))
            if len(batch) < settings.batch_size:
                raise UserError(
                    f"the demonstrations ended in step {step + 1}: "
                    f"{settings.steps} steps of {settings.batch_size} need {settings.steps * settings.batch_size}"
                )
            learning_rate = trainer.learning_rate * schedule(step, settings.steps, trainer.warmup_steps)
            metrics = _step(batch, policy, optimizer, settings, learning_rate, device)
            log({"step": float(step + 1), **metrics})
            in_a_row = in_a_row + 1 if metrics["loss/skipped_nonfinite"] else 0
            if in_a_row >= trainer.max_nonfinite_in_a_row:
                raise RunError(
                    f"{in_a_row} updates in a row had a loss or a gradient that is not finite, the last in step "
                    f"{step + 1}, and were skipped: try a lower trainer.learning_rate"
                )
    finally:
        run.release()
    return _save(settings, model, tokenizer)


def schedule(step: int, steps: int, warmup: int) -> float:
    """The factor of the learning rate at `step` (from 0): up a line over `warmup` steps, down a cosine to 0 at `steps`.

    Example: with steps=100, warmup=10 it is 0.1 at step 0, 1.0 at step 9 and 10, 0.5 at step 55.
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def _step(
    batch: list[Sample],
    policy: Policy,
    optimizer: MasterOptimizer,
    settings: SftSettings,
    learning_rate: float,
    device: str,
) -> dict[str, float]:
    started = time.perf_counter()
    learnt = sum(len(s.targets) for s in batch)
    total = 0.0
    for m in make_micro_batches(batch, settings.trainer.token_budget, device):
        logprobs, _ = policy.logprobs(m)
        loss = -logprobs.sum() / learnt
        loss.backward()
        total += float(loss.detach())
    norm, updated = optimizer.step(learning_rate, settings.trainer.max_grad_norm, math.isfinite(total))
    return {
        "loss/cross_entropy": total,
        "loss/grad_norm": norm,
        "loss/learning_rate": learning_rate,
        "loss/skipped_nonfinite": float(not updated and norm != 0),
        "tokens/trained": float(sum(len(s.tokens) for s in batch)),
        "time/step": time.perf_counter() - started,
    }


def _sample(row: SftRow, eos: int, token_budget: int) -> Sample:
    tokens = np.array([*row.prompt_ids, *row.completion_ids, eos], dtype=np.int32)
    if len(tokens) > token_budget:
        raise UserError(f"a demonstration has {len(tokens)} tokens; trainer.token_budget = {token_budget} is too small")
    targets = np.arange(max(len(row.prompt_ids), 1), len(tokens), dtype=np.int32)
    unknown = np.zeros(len(targets), dtype=np.float32)
    return Sample(tokens=tokens, targets=targets, behaviour=unknown, versions=unknown.astype(np.int32))


def _open_model(settings: SftSettings) -> tuple[Any, torch.nn.Module]:
    """The tokenizer and the model, in fp32: from `model.path`, or anew from `model.config`."""
    if settings.model.path is not None:
        return load_tokenizer(settings.model.path), load_model(settings.model.path, torch.float32)
    assert settings.model.config is not None
    assert settings.model.alphabet is not None
    tokenizer = build_char_tokenizer(settings.model.alphabet)
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    try:
        return tokenizer, build_model({**settings.model.config, **ids}).eval()
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"model.config: {error}") from error


def _save(settings: SftSettings, model: torch.nn.Module, tokenizer: Any) -> Path:
    """The Hugging Face directory, whole under its name or not there; an earlier model under that name is replaced."""
    path = Path(settings.model.save)
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if settings.model.path is not None:
        save_model(part, model, resolve_model(settings.model.path))
    else:
        save_model(part, model, None)
        tokenizer.save_pretrained(part)
    shutil.rmtree(path, ignore_errors=True)
    part.rename(path)
    return path


def _default_log(run: RunDirectory, steps: int) -> Log:
    file = run.metrics.open("w", buffering=1)
    every = max(1, steps // 50)

    def log(metrics: dict[str, float]) -> None:
        file.write(json.dumps(metrics) + "\n")
        step = int(metrics["step"])
        if step == 1 or step % every == 0 or step == steps:
            rate = metrics["tokens/trained"] / metrics["time/step"]
            print(
                f"step {step}/{steps}  loss {metrics['loss/cross_entropy']:.4f}  "
                f"learning rate {metrics['loss/learning_rate']:.2e}  {rate:,.0f} tokens/s",
                flush=True,
            )

    return log
