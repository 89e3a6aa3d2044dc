"""What a token's loss counts: factors `[tokens]` whose sum with the per-token losses is the loss.

The denominators are those of the whole minibatch on all ranks, so that how it was split in micro-batches does not show.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fleuve.algorithms.answers import Answers


class Totals(NamedTuple):
    """Of the whole minibatch, over all ranks: learnt `tokens`, and `answers` that have at least one of them.

    They do not shrink by what a correction or a clip takes out: dropping tokens makes an update smaller, never larger.
    """

    tokens: float
    answers: float


def token_mean(answers: Answers, totals: Totals, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """1 / tokens: the mean over all tokens, so that a long answer counts more (Yu et al. 2025, DAPO, eq. 12)."""
    return _same(answers, totals.tokens, dtype)


def answer_mean(answers: Answers, totals: Totals, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """1 / (answers · tokens of this answer): the mean over answers of the mean over their tokens, so that a token of a
    long answer counts less (Shao et al. 2024, GRPO, eq. 3)."""
    return 1.0 / (totals.answers * answers.spread(answers.lengths.to(dtype)))


def constant(answers: Answers, totals: Totals, *, horizon: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """1 / (answers · horizon): the mean over answers of the sum over their tokens, divided by the same number for all,
    usually the length of the longest possible answer; no token counts more or less for the length of its answer (Liu et
    al. 2025, Dr. GRPO)."""
    return _same(answers, totals.answers * horizon, dtype)


def _same(answers: Answers, denominator: float, dtype: torch.dtype) -> Tensor:
    """`[tokens]`: 1 / `denominator` for every token; a micro-batch without tokens may come with totals of zero."""
    tokens = len(answers.index)
    if tokens == 0:
        return torch.zeros(0, dtype=dtype, device=answers.index.device)
    return torch.full((tokens,), 1.0 / denominator, dtype=dtype, device=answers.index.device)
