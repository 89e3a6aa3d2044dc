"""Which token gets the credit: from a batch's rewards, by the settings, to the advantage of every learnt token.

Filter, shape, compare, normalise, in this order: a rejected answer shifts no baseline and no statistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fleuve.algorithms.advantages import gae, group_relative, leave_one_out, reward_to_go, whiten
from fleuve.algorithms.shaping import overlong_penalty, scaled, token_rewards
from fleuve.config.settings import AlgorithmSettings
from fleuve.train.microbatch import Sample
from fleuve.types import BoolArray, Group, Trajectory

LARGEST_REWARD = 1e15
"""What is larger counts as this: sums of squares of it still fit single precision."""


@dataclass(frozen=True)
class Credit:
    """Of one answer, `[learnt tokens]` each: `advantages`, and with a critic `returns` and the `values` they rest on.
    `shaped_reward` is what they come from, and `kl_penalty` what KL in the reward took off it."""

    advantages: Tensor
    shaped_reward: float
    kl_penalty: float = 0.0
    returns: Tensor | None = None
    values: Tensor | None = None

    @property
    def mean(self) -> float:
        """The mean advantage: of most estimators, every token's."""
        return float(self.advantages.double().mean()) if len(self.advantages) else 0.0


Credits = list[list[Credit | None]]
"""`[groups, samples]`; None for an answer that is rejected."""

PerToken = Callable[[int, int], Tensor]
"""Group and sample (both as numbered in the batch) to a tensor `[sampled tokens]`: where the loss mask holds."""


def shaped_reward(trajectory: Trajectory, algorithm: AlgorithmSettings, max_new_tokens: int) -> float | None:
    """The reward that is learnt from: scaled, clipped, less the penalty of an answer that is nearly too long. None for
    an answer that is rejected: without a finite reward, or cut off where those are to be left out."""
    bound = min(algorithm.reward_clip or LARGEST_REWARD, LARGEST_REWARD)
    reward = scaled(trajectory.comparable_reward(algorithm.truncated), algorithm.reward_scale, -bound, bound)
    if reward is None or not algorithm.overlong_buffer:
        return reward
    buffer = round(algorithm.overlong_buffer * max_new_tokens)
    return reward + overlong_penalty(len(trajectory.output_ids), max_new_tokens, buffer, algorithm.overlong_penalty)


def assign_credit(
    groups: Sequence[Group],
    algorithm: AlgorithmSettings,
    max_new_tokens: int,
    learnt: Callable[[Trajectory], BoolArray],
    kl: PerToken | None = None,
    values: PerToken | None = None,
) -> Credits:
    """Advantages by `algorithm.baseline` and `algorithm.normalise`.

    Args:
        learnt: which output tokens get a gradient, `[output tokens]`; those of the loss mask, or some of them.
        kl: where KL is in the reward, its estimate at each token (times `kl_coefficient` it is taken off). An answer
            for which that is no number is rejected as one without a reward is.
        values: where there is a critic, its values at the start of the step.
    """
    credits: Credits = []
    for g, group in enumerate(groups):
        rewards = [shaped_reward(t, algorithm, max_new_tokens) for t in group.trajectories]
        penalties = [
            kl(g, i) if kl is not None and r is not None else torch.zeros(int(t.loss_mask.sum()))
            for i, (t, r) in enumerate(zip(group.trajectories, rewards, strict=True))
        ]
        rewards = [r if math.isfinite(p.sum()) else None for r, p in zip(rewards, penalties, strict=True)]
        compared = _compare(rewards, penalties, algorithm)
        row: list[Credit | None] = []
        for i, (trajectory, reward) in enumerate(zip(group.trajectories, rewards, strict=True)):
            if reward is None:
                row.append(None)
                continue
            selected = torch.from_numpy(np.ascontiguousarray(learnt(trajectory)[trajectory.loss_mask]))
            whole = compared[i]
            penalty = algorithm.kl_coefficient * float(penalties[i].double().sum())
            credit = Credit(torch.full((int(selected.sum()),), whole or 0.0), reward, penalty)
            if whole is None:
                tokens = token_rewards(reward, penalties[i], algorithm.kl_coefficient)
                if values is None:
                    credit = replace(credit, advantages=reward_to_go(tokens, algorithm.gamma)[selected])
                else:
                    before = values(g, i)
                    advantages, returns = gae(tokens, before, algorithm.gamma, algorithm.gae_lambda)
                    credit = Credit(advantages[selected], reward, penalty, returns[selected], before[selected])
            row.append(credit)
        credits.append(row)
    return _whitened(credits) if algorithm.normalise == "batch" else credits


def with_credit(sample: Sample, credit: Credit) -> Sample:
    """The sample with what its targets, the learnt tokens, are worth."""
    return replace(
        sample,
        advantages=credit.advantages.float().numpy(),
        returns=None if credit.returns is None else credit.returns.float().numpy(),
        values=None if credit.values is None else credit.values.float().numpy(),
    )


def _compare(
    rewards: Sequence[float | None], penalties: Sequence[Tensor], algorithm: AlgorithmSettings
) -> list[float | None]:
    """The advantage of each answer as a whole, against its group; None where tokens are judged one by one (or the
    answer is rejected)."""
    if algorithm.baseline not in ("group", "leave_one_out"):
        return [None] * len(rewards)
    totals = [
        None if r is None else r - algorithm.kl_coefficient * float(p.double().sum())
        for r, p in zip(rewards, penalties, strict=True)
    ]
    if algorithm.baseline == "leave_one_out":
        return leave_one_out(totals)
    return group_relative(totals, normalise=algorithm.normalise == "group")


def _whitened(credits: Credits) -> Credits:
    flat = iter(whiten([credit.advantages for row in credits for credit in row if credit is not None]))
    return [[None if c is None else replace(c, advantages=next(flat)) for c in row] for row in credits]
