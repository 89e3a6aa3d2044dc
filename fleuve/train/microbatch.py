"""From trajectories to packed micro-batches: which tokens go through the model, and which of them are learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fleuve.train.packing import pack
from fleuve.types import BoolArray, Float32Array, Group, Int32Array, Trajectory


@dataclass(frozen=True)
class Sample:
    """One sequence to learn from. `targets` are positions in `tokens` (each at least 1) whose tokens are learnt;
    `behaviour` and `versions` are aligned with them, `[targets]`."""

    tokens: Int32Array
    targets: Int32Array
    behaviour: Float32Array
    versions: Int32Array
    advantage: float = 1.0


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed end to end. `[tokens]`: `input_ids`, `position_ids`. `[targets]`, aligned: `rows` (whose hidden
    state predicts), `targets` (what came), `behaviour`, `versions`, `advantages`. `lengths` are the sequences'."""

    input_ids: Tensor
    position_ids: Tensor
    lengths: list[int]
    rows: Tensor
    targets: Tensor
    behaviour: Tensor
    versions: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class Minibatch:
    """One optimiser update: the groups it trains, their micro-batches, and the loss's denominator over all of them
    (learnt tokens). Without micro-batches there is nothing to learn in it."""

    groups: list[Group]
    micro_batches: list[MicroBatch]
    loss_tokens: int


def sample_of(trajectory: Trajectory, advantage: float, learnt: BoolArray) -> Sample:
    """A trajectory's sequence; `learnt` `[output tokens]` says which of its output tokens get a gradient."""
    return Sample(
        tokens=np.concatenate([trajectory.prompt_ids, trajectory.output_ids]),
        targets=(len(trajectory.prompt_ids) + np.flatnonzero(learnt)).astype(np.int32),
        behaviour=trajectory.logprobs[learnt],
        versions=trajectory.versions[learnt],
        advantage=advantage,
    )


def make_micro_batches(samples: Sequence[Sample], token_budget: int, device: str = "cpu") -> list[MicroBatch]:
    """Pack samples under the budget. Sequences without anything to learn are left out.

    What comes after the last learnt token has no influence on anything: it is cut off, and so is that token itself,
    which nothing predicts from.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    useful = [s for s in samples if len(s.targets)]
    bins = pack([int(s.targets[-1]) for s in useful], token_budget)
    return [_micro_batch([useful[i] for i in indices], device) for indices in bins]


def _micro_batch(samples: Sequence[Sample], device: str) -> MicroBatch:
    lengths = [int(s.targets[-1]) for s in samples]
    starts = np.cumsum([0, *lengths[:-1]])

    def tensor(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device=device, dtype=dtype)

    return MicroBatch(
        input_ids=tensor([s.tokens[:n] for s, n in zip(samples, lengths, strict=True)], torch.int64),
        position_ids=tensor([np.arange(n) for n in lengths], torch.int64),
        lengths=lengths,
        rows=tensor([start + s.targets - 1 for s, start in zip(samples, starts, strict=True)], torch.int64),
        targets=tensor([s.tokens[s.targets] for s in samples], torch.int64),
        behaviour=tensor([s.behaviour for s in samples], torch.float32),
        versions=tensor([s.versions for s in samples], torch.int32),
        advantages=tensor([np.full(len(s.targets), s.advantage) for s in samples], torch.float32),
    )
