"""What a training step reports of its batch and of the weights that it started from."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from fleuve.train.credit import Credits
from fleuve.train.microbatch import MicroBatch
from fleuve.train.ranks import Ranks
from fleuve.types import Batch, BoolArray, Trajectory

SOLVED = 0.5
"""An answer with a reward above this counts as solved."""


def learnt_tokens(trajectory: Trajectory, oldest: int | None) -> BoolArray:
    """Which output tokens get a gradient, `[tokens]`: those of the loss mask, sampled by version `oldest` or later."""
    if oldest is None:
        return trajectory.loss_mask
    return trajectory.loss_mask & (trajectory.versions >= oldest)


def batch_metrics(batch: Batch, max_staleness: int) -> dict[str, float]:
    """Rewards, lengths and staleness of the answers that have a (finite) reward. Staleness is counted over sampled
    tokens."""
    answers = [t for t in batch.trajectories if t.reward is not None and math.isfinite(t.reward)]
    metrics = {"groups/trained": float(len(batch.groups)), "tokens/trained": float(sum(t.length for t in answers))}
    if not answers:
        return metrics
    rewards = np.array([t.reward for t in answers])
    lengths = np.array([len(t.output_ids) for t in answers])
    metrics |= {
        "reward/mean": float(rewards.mean()),
        "reward/solved": float((rewards > SOLVED).mean()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(np.mean([t.finish_reason == "length" for t in answers])),
    }
    staleness = batch.version - np.concatenate([t.versions[t.loss_mask] for t in answers])
    if len(staleness):
        metrics |= {
            "staleness/mean": float(staleness.mean()),
            "staleness/max": float(staleness.max()),
            "staleness/overdue_fraction": float((staleness > max_staleness).mean()),
        }
    return metrics


def credit_metrics(credits: Credits) -> dict[str, float]:
    """`reward/shaped_mean`: of the rewards that are learnt from. `reward/kl_penalty_mean`: what KL in the reward took
    off them. `advantage/rejected_fraction`: answers that are not learnt from at all. `advantage/zero_fraction`: of the
    others, those without any advantage, from which only a regulariser learns."""
    answers = [credit for row in credits for credit in row]
    known = [credit for credit in answers if credit is not None]
    metrics = {"advantage/rejected_fraction": 1 - len(known) / len(answers)} if answers else {}
    if not known:
        return metrics
    return metrics | {
        "reward/shaped_mean": float(np.mean([credit.shaped_reward for credit in known])),
        "reward/kl_penalty_mean": float(np.mean([credit.kl_penalty for credit in known])),
        "advantage/zero_fraction": float(np.mean([not bool(credit.advantages.any()) for credit in known])),
    }


class StartOfStep:
    """How the weights at the start of a step see the tokens they learn from, micro-batch by micro-batch.

    `loss/entropy` is their mean entropy. `mismatch/logprob_abs_mean` compares the trainer's log-probability with that
    recorded at sampling, over tokens of the very same version: what remains is the difference between two
    implementations (and what top-p or top-k cut off, where they are on).
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self._entropy = self._mismatch = 0.0
        self._tokens = self._same_version = 0

    def add(self, micro_batch: MicroBatch, logprobs: Tensor, entropies: Tensor | None) -> None:
        """All `[targets]`."""
        if entropies is not None:
            self._entropy += float(entropies.detach().sum())
            self._tokens += len(entropies)
        same = micro_batch.versions == self.version
        self._mismatch += float(((logprobs.detach() - micro_batch.behaviour).abs() * same).sum())
        self._same_version += int(same.sum())

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Those that were measured on at least one token of any rank."""
        entropy, tokens, mismatch, same = ranks.sum([self._entropy, self._tokens, self._mismatch, self._same_version])
        metrics = {}
        if tokens:
            metrics["loss/entropy"] = entropy / tokens
        if same:
            metrics["mismatch/logprob_abs_mean"] = mismatch / same
        return metrics
