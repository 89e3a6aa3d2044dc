"""From times of a real run to `[simulate.measured]`: what the cost models' data sheets cannot know of a machine."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
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
    """One step of an engine: `sequences` sampled a token each with `kv_tokens` in their caches, and `prefill_tokens` of
    prompts were computed for it."""

    seconds: float
    sequences: int = 0
    kv_tokens: float = 0.0
    prefill_tokens: int = 0


def fit_engine(steps: Sequence[EngineStep]) -> dict[str, float]:
    """The linear model that comes nearest to the steps, each by its relative error; no part of it is negative. What a
    prefill costs is what a step takes longer for it: in the embedded engine prompts are computed beside others' tokens.

    Raises:
        ValueError: there are not steps of three different sizes, or no prefills of two.
    """
    decodes = [s for s in steps if not s.prefill_tokens]
    prefills = [s for s in steps if s.prefill_tokens]
    if len({(s.sequences, s.kv_tokens) for s in decodes}) < 3 or len({s.prefill_tokens for s in prefills}) < 2:
        raise ValueError("to tell the parts of a step apart, give steps of different sizes")
    base, per_sequence, per_kv, prefill_base, per_token = non_negative(
        [
            [float(s.sequences > 0), s.sequences, s.kv_tokens, float(s.prefill_tokens > 0), s.prefill_tokens]
            for s in steps
        ],
        [s.seconds for s in steps],
    )
    return {
        "decode_base": base,
        "decode_per_sequence": per_sequence,
        "decode_per_kv_token": per_kv,
        "prefill_base": prefill_base,
        "prefill_per_token": per_token,
    }


def fit_trainer(run: Path, again: Mapping[int, Mapping[str, float]] | None = None) -> dict[str, float]:
    """What a run's own `metrics.jsonl` and `rollouts/` say of its trainer: each step's answers are packed as they were,
    and its times divided between their tokens and their micro-batches.

    Args:
        again: by step, `time/update` and `time/proximal` of the same batches trained in other circumstances, which then
            take the place of the run's own.

    Raises:
        UserError: there is no run, it kept no rollouts, or it has too few steps.
    """
    directory, rows = RunDirectory(run), _rows(run)[FIRST_STEPS:]
    settings = load_settings(directory.config)
    steps = [(row, _work_of(directory.rollout_file(int(row["step"])), settings)) for row in rows]
    if len(steps) < 3:
        raise UserError(f"{run} has {len(rows) + FIRST_STEPS} steps; give a run of {FIRST_STEPS + 3} or more")
    columns, seconds = [], []
    for row, (trained, forwarded) in steps:
        times = row if again is None else again[int(row["step"])]
        for name, work in (("time/update", trained), ("time/proximal", forwarded)):
            if work.tokens:
                training = name == "time/update"
                columns.append([work.tokens * training, work.tokens * (not training), work.micro_batches])
                seconds.append(float(times[name]))
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
    """The share of a run's tokens that are in groups from which there was something to learn: `simulate.learnt`. By
    tokens, since groups whose answers are all right, or all wrong, are not as long as the others.

    Raises:
        UserError: it kept no rollouts.
    """
    groups = _all_groups(run)
    tokens = [sum(_lengths(group, learnt_only=False)) for group in groups]
    learnt = [any(_learnt(t) for t in group["trajectories"]) for group in groups]
    return sum(n for n, counts in zip(tokens, learnt, strict=True) if counts) / max(sum(tokens), 1)


def prompt_tokens(run: Path) -> int:
    """The mean length of a run's prompts: `simulate.prompt_tokens`.

    Raises:
        UserError: it kept no rollouts.
    """
    return max(1, round(statistics.fmean(len(group["prompt_ids"]) for group in _all_groups(run))))


def prompt_share(run: Path) -> float:
    """How much of the variance of a run's answer lengths is the prompts': `simulate.lengths.prompt_share`. Of the ranks
    among all answers, as quantiles of a normal; an analysis of variance with the groups as the factor.

    Raises:
        UserError: it kept no rollouts.
    """
    groups = [[len(t["output_ids"]) for t in group["trajectories"]] for group in _all_groups(run)]
    lengths = np.asarray([n for group in groups for n in group], np.float64)
    size = len(lengths) / len(groups)
    if len(groups) < 2 or size <= 1:
        return 0.0
    rank = np.searchsorted(np.sort(lengths), lengths, side="left") + np.searchsorted(np.sort(lengths), lengths, "right")
    normal = iter([NormalDist().inv_cdf(r / 2 / len(lengths)) for r in rank.tolist()])
    scores = [[next(normal) for _ in group] for group in groups]
    within = sum(float(np.var(group)) * len(group) for group in scores) / (len(lengths) - len(groups))
    between = float(np.var([float(np.mean(group)) for group in scores], ddof=1)) - within / size
    total = between + within
    return min(1.0, max(0.0, between / total)) if total > 0 else 0.0


def verdict_seconds(run: Path) -> float:
    """What a verdict took on a run, waiting for the verifier included, in the mean: `simulate.reward_seconds`.

    Raises:
        UserError: there is no run.
    """
    row = _rows(run)[-1]
    return float(row.get("reward_service/seconds_mean", 0.0)) + float(row.get("reward_service/queue_seconds_mean", 0.0))


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
        answers = [t for group in groups[start:end] for t in _lengths(group, learnt_only=not everything)]
        if not answers:
            continue
        work = _Work(sum(answers), len(pack(answers, settings.trainer.token_budget)))
        trained += work
        if settings.algorithm.proximal == "recompute" and not first:
            forwarded += work
        first = False
    return trained, forwarded


def _lengths(group: dict[str, Any], learnt_only: bool) -> list[int]:
    """Of the sequences that go through the model; nothing is predicted from their last token."""
    prompt = len(group["prompt_ids"])
    answers = [t for t in group["trajectories"] if _learnt(t) or (not learnt_only and t["reward"] is not None)]
    return [prompt + len(t["output_ids"]) - 1 for t in answers]


def _rows(run: Path) -> list[dict[str, Any]]:
    metrics = RunDirectory(run).metrics
    if not metrics.is_file() or not (rows := read_metrics(metrics)):
        raise UserError(f"{run} holds no metrics.jsonl: it is not a run directory")
    return rows


def _all_groups(run: Path) -> list[dict[str, Any]]:
    files = sorted(RunDirectory(run).rollouts.glob("*.jsonl"))
    groups = [group for file in files for group in _groups(file)]
    if not groups:
        raise UserError(f"{run}: no rollouts in it; its settings need observe.rollouts = true")
    return groups


def _learnt(trajectory: dict[str, Any]) -> bool:
    return bool(trajectory["advantage"])


def _groups(file: Path) -> list[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as rollouts: {error}") from None
