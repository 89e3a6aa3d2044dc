"""Which token belongs to which answer, in a packed micro-batch: what every per-answer sum and mean is taken over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fleuve.algorithms.ratios import upcast


@dataclass(frozen=True)
class Answers:
    """The answers of one micro-batch of packed tokens; only learnt tokens are among them, and answers are whole.

    Attributes:
        index: `[tokens]` int64, which answer each token belongs to, from 0 to `count` − 1.
        count: how many answers there are; one without any learnt token counts too.

    Example:
        >>> Answers.of([2, 1]).mean(torch.tensor([1.0, 3.0, 5.0])).tolist()
        [2.0, 5.0]
    """

    index: Tensor
    count: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Answers:
        """Answers that lie one after the other, of `lengths` learnt tokens each."""
        repeats = torch.tensor(list(lengths), dtype=torch.int64, device=device)
        return cls(torch.repeat_interleave(torch.arange(len(lengths), device=device), repeats), len(lengths))

    @property
    def lengths(self) -> Tensor:
        """`[answers]` int64: learnt tokens of each answer."""
        return torch.bincount(self.index, minlength=self.count)

    def sum(self, x: Tensor) -> Tensor:
        """`[answers]`: the sum of `x` `[tokens]` over each answer, at least in float32; 0 for one without tokens."""
        x = upcast(x)
        return x.new_zeros(self.count).index_add(0, self.index, x)

    def mean(self, x: Tensor) -> Tensor:
        """`[answers]`: the mean of `x` `[tokens]` over each answer; 0 for one without tokens."""
        return self.sum(x) / self.lengths.clamp(min=1)

    def spread(self, per_answer: Tensor) -> Tensor:
        """`[tokens]`: each token gets its answer's number from `per_answer` `[answers]`."""
        return per_answer.index_select(0, self.index)
