"""From times of a real run to `[simulate.measured]`: what the cost models' data sheets cannot know of a machine."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleuve.config.loader import load_settings
from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.observe.metrics import read_metrics
from fleuve.observe.rundir import RunDirectory
from fleuve.train.packing import pack

FIRST_STEPS = 1
"""Not looked at: kernels and memory are warmed up in them."""


@dataclass(frozen=True)
class EngineStep:
    """One step of an engine: `sequences` decoded with `kv_tokens` in their caches, or `prefill_tokens` computed."""

    seconds: float
    sequences: int = 0
    kv_tokens: float = 0.0
    prefill_tokens: int = 0


def fit_engine(steps: Sequence[EngineStep]) -> dict[str, float]:
    """The linear model that comes nearest to the steps, each by its relative error; no part of it is negative.

    Raises:
        ValueError: there are not steps of three different sizes, or no prefills of two.
    """
    decodes = [s for s in steps if not s.prefill_tokens]
    prefills = [s for s in steps if s.prefill_tokens]
    if len({(s.sequences, s.kv_tokens) for s in decodes}) < 3 or len({s.prefill_tokens for s in prefills}) < 2:
        raise ValueError("to tell the parts of a step apart, give steps of different sizes")
    base, per_sequence, per_kv = non_negative(
        [[1.0, s.sequences, s.kv_tokens] for s in decodes], [s.seconds for s in decodes]
    )
    prefill_base, per_token = non_negative([[1.0, s.prefill_tokens] for s in prefills], [s.seconds for s in prefills])
    return {
        "decode_base": base,
        "decode_per_sequence": per_sequence,
        "decode_per_kv_token": per_kv,
        "prefill_base": prefill_base,
        "prefill_per_token": per_token,
    }


def fit_trainer(run: Path) -> dict[str, float]:
    """What a run's own `metrics.jsonl` and `rollouts/` say of its trainer: each step's answers are packed as they were,
    and its times divided between their tokens and their micro-batches.

    Raises:
        UserError: there is no run, it kept no rollouts, or it has too few steps.
    """
    directory = RunDirectory(run)
    if not directory.metrics.is_file():
        raise UserError(f"{run} holds no metrics.jsonl: it is not a run directory")
    settings = load_settings(directory.config)
    rows = read_metrics(directory.metrics)[FIRST_STEPS:]
    steps = [(row, _work_of(directory.rollout_file(int(row["step"])), settings)) for row in rows]
    if len(steps) < 3:
        raise UserError(f"{run} has {len(rows) + FIRST_STEPS} steps; give a run of {FIRST_STEPS + 3} or more")
    columns, seconds = [], []
    for row, (trained, forwarded) in steps:
        for name, work in (("time/update", trained), ("time/proximal", forwarded)):
            if work.tokens:
                training = name == "time/update"
                columns.append([work.tokens * training, work.tokens * (not training), work.micro_batches])
                seconds.append(float(row[name]))
    per_token, forward, per_micro_batch = non_negative(columns, seconds)
    beside = ("time/wait_for_batch", "time/proximal", "time/update", "time/publish")
    return {
        "train_per_token": per_token,
        "forward_per_token": forward,
        "train_per_micro_batch": per_micro_batch,
        "step": statistics.median(
            max(0.0, row["time/step"] - sum(row.get(n, 0.0) for n in beside)) for row, _ in steps
        ),
        "publish": statistics.median(row["time/publish"] for row, _ in steps),
        "update": statistics.median(row.get("time/weight_sync", 0.0) for row, _ in steps),
    }


def learnt_share(run: Path) -> float:
    """The share of a run's groups from which there was something to learn: `simulate.learnt`.

    Raises:
        UserError: it kept no rollouts.
    """
    files = sorted(RunDirectory(run).rollouts.glob("*.jsonl"))
    groups = [group for file in files for group in _groups(file)]
    if not groups:
        raise UserError(f"{run}: no rollouts in it; its settings need observe.rollouts = true")
    return statistics.fmean(any(_learnt(t) for t in group["trajectories"]) for group in groups)


def non_negative(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Factors, none below zero, whose sums of columns come nearest to `seconds` by the squares of the relative errors.

    Every set of columns is tried, which is exact, and quick for the two or three that there are.
    """
    weights = 1 / np.maximum(np.asarray(seconds, np.float64), 1e-12)
    matrix = np.asarray(columns, np.float64) * weights[:, None]
    count = matrix.shape[1]
    best, least = np.zeros(count), float(len(seconds))  # all factors zero: every relative error is 1
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = matrix[:, chosen]
            scale = np.abs(part).max(axis=0)
            if not scale.all():
                continue
            found = np.linalg.lstsq(part / scale, np.ones(len(seconds)), rcond=None)[0] / scale
            error = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = found
    return [float(factor) for factor in best]


@dataclass(frozen=True)
class _Work:
    tokens: int = 0
    micro_batches: int = 0

    def __add__(self, other: _Work) -> _Work:
        return _Work(self.tokens + other.tokens, self.micro_batches + other.micro_batches)


def _work_of(file: Path, settings: Settings) -> tuple[_Work, _Work]:
    """One step's training, and its proximal pass: of every minibatch that learns but the first."""
    groups, count = _groups(file), settings.trainer.minibatches
    everything = settings.algorithm.regularised or settings.algorithm.baseline == "critic"
    trained, forwarded, first = _Work(), _Work(), True
    ends = [len(groups) * i // count for i in range(count + 1)]
    for start, end in itertools.pairwise(ends):
        answers = [t for group in groups[start:end] for t in _lengths(group, everything)]
        if not answers:
            continue
        work = _Work(sum(answers), len(pack(answers, settings.trainer.token_budget)))
        trained += work
        if settings.algorithm.proximal == "recompute" and not first:
            forwarded += work
        first = False
    return trained, forwarded


def _lengths(group: dict[str, Any], everything: bool) -> list[int]:
    """Of the sequences that go through the model; nothing is predicted from their last token."""
    prompt = len(group["prompt_ids"])
    answers = [t for t in group["trajectories"] if (everything and t["reward"] is not None) or _learnt(t)]
    return [prompt + len(t["output_ids"]) - 1 for t in answers]


def _learnt(trajectory: dict[str, Any]) -> bool:
    return bool(trajectory["advantage"])


def _groups(file: Path) -> list[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as rollouts: {error}") from None
