"""From trajectories to packed micro-batches: which tokens go through the model, and which of them are learnt from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fleuve.algorithms.aggregation import Totals
from fleuve.algorithms.answers import Answers
from fleuve.train.packing import Bins, pack
from fleuve.types import BoolArray, Float32Array, Group, Int32Array, Trajectory


@dataclass(frozen=True)
class Sample:
    """One sequence to learn from. `targets` are positions in `tokens` (each at least 1) whose tokens are learnt; all
    other arrays are aligned with them, `[targets]`. `returns` and `values` (those of the start of the step) are a
    critic's, None without one."""

    tokens: Int32Array
    targets: Int32Array
    behaviour: Float32Array
    versions: Int32Array
    advantages: Float32Array | None = None
    returns: Float32Array | None = None
    values: Float32Array | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed end to end. `[tokens]`: `input_ids`, `position_ids`. `[targets]`, aligned: `rows` (whose hidden
    state predicts), `targets` (what came), `behaviour`, `versions`, `advantages`, `returns`, `values`. `lengths` are
    the sequences'; `samples` says which of the samples given they are, and `answers` whose each target is.

    A dummy holds none of them: a rank that has nothing left to compute runs it while the others compute, as all gather
    weights together. What comes of it counts nowhere."""

    input_ids: Tensor
    position_ids: Tensor
    lengths: list[int]
    samples: list[int]
    answers: Answers
    rows: Tensor
    targets: Tensor
    behaviour: Tensor
    versions: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor

    @property
    def dummy(self) -> bool:
        """Whether nothing is to be learnt from it."""
        return not self.samples


@dataclass(frozen=True)
class Minibatch:
    """One optimiser update: the groups it trains, their micro-batches, and the loss's totals over all of them.
    Without micro-batches there is nothing to learn in it."""

    groups: list[Group]
    micro_batches: list[MicroBatch]
    totals: Totals


def sample_of(trajectory: Trajectory, learnt: BoolArray) -> Sample:
    """A trajectory's sequence; `learnt` `[output tokens]` says which of its output tokens get a gradient."""
    return Sample(
        tokens=np.concatenate([trajectory.prompt_ids, trajectory.output_ids]),
        targets=(len(trajectory.prompt_ids) + np.flatnonzero(learnt)).astype(np.int32),
        behaviour=trajectory.logprobs[learnt],
        versions=trajectory.versions[learnt],
    )


def make_micro_batches(
    samples: Sequence[Sample],
    token_budget: int,
    device: str = "cpu",
    pack: Callable[[Sequence[int], int], Bins] = pack,
) -> list[MicroBatch]:
    """Pack samples under the budget. Sequences without anything to learn are left out.

    What comes after the last learnt token has no influence on anything: it is cut off, and so is that token itself,
    which nothing predicts from. `pack` gets lengths and the budget; it may leave out what other ranks compute, and an
    empty micro-batch of its becomes a dummy.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    useful = [i for i, s in enumerate(samples) if len(s.targets)]
    bins = pack([int(samples[i].targets[-1]) for i in useful], token_budget)
    return [
        _micro_batch(samples, [useful[i] for i in indices], device) if indices else _dummy(device) for indices in bins
    ]


def evaluate_samples(
    samples: Sequence[Sample], micro_batches: Sequence[MicroBatch], compute: Callable[[MicroBatch], Tensor]
) -> list[Tensor]:
    """`compute`'s `[targets]` of every micro-batch, put back in the order of the samples that they were made of: one
    tensor `[targets]` on the CPU for each."""
    found = [torch.zeros(0)] * len(samples)
    for m in micro_batches:
        computed = compute(m)
        if m.dummy:
            continue
        parts = computed.cpu().split([len(samples[i].targets) for i in m.samples])
        for i, part in zip(m.samples, parts, strict=True):
            found[i] = part
    return found


def _dummy(device: str) -> MicroBatch:
    """One token, from which one is predicted: every weight takes part, so that every weight has a gradient."""
    sample = Sample(np.zeros(2, np.int32), np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
    return replace(_micro_batch([sample], [0], device), samples=[])


def _micro_batch(given: Sequence[Sample], indices: list[int], device: str) -> MicroBatch:
    samples = [given[i] for i in indices]
    lengths = [int(s.targets[-1]) for s in samples]
    starts = np.cumsum([0, *lengths[:-1]])

    def tensor(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device=device, dtype=dtype)

    def floats(parts: list[Float32Array | None]) -> Tensor:
        known = [np.zeros(len(s.targets), np.float32) if x is None else x for x, s in zip(parts, samples, strict=True)]
        return tensor(known, torch.float32)

    return MicroBatch(
        samples=indices,
        answers=Answers.of([len(s.targets) for s in samples], device),
        input_ids=tensor([s.tokens[:n] for s, n in zip(samples, lengths, strict=True)], torch.int64),
        position_ids=tensor([np.arange(n) for n in lengths], torch.int64),
        lengths=lengths,
        rows=tensor([start + s.targets - 1 for s, start in zip(samples, starts, strict=True)], torch.int64),
        targets=tensor([s.tokens[s.targets] for s in samples], torch.int64),
        behaviour=tensor([s.behaviour for s in samples], torch.float32),
        versions=tensor([s.versions for s in samples], torch.int32),
        advantages=floats([s.advantages for s in samples]),
        returns=floats([s.returns for s in samples]),
        values=floats([s.values for s in samples]),
    )
