"""A training step taken again, answer by answer, to see where its first NaN or infinity comes from.

It goes the trainer's own way, through the trainer's own parts; only the size of the micro-batches is another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fleuve.algorithms.losses import LossInputs
from fleuve.train.anchors import Anchors, find_anchors
from fleuve.train.metrics import StartOfStep
from fleuve.train.microbatch import Minibatch, Sample, make_micro_batches
from fleuve.train.trainer import Trainer, split_evenly
from fleuve.types import Batch

ORDER = ("behaviour", "advantages", "logprobs", "proximal", "reference", "entropies")
"""The order in which the parts of a loss are looked at: what comes from outside before what is computed from it."""

NAMES = {
    "behaviour": "recorded log-probability",
    "advantages": "advantage",
    "logprobs": "log-probability",
    "proximal": "proximal log-probability",
    "reference": "reference's log-probability",
    "entropies": "entropy",
}


@dataclass(frozen=True)
class TokenFinding:
    """The first token with a part that is not finite. `index` counts the answer's tokens from 0."""

    part: str
    value: float
    index: int
    token: int
    version: int


@dataclass(frozen=True)
class AnswerFinding:
    """One answer by itself: its share of the loss, the norm of its share of the gradient, and what is wrong first: in a
    token; else in the loss, or in the gradient of `parameter`."""

    group: int
    prompt: str
    answer: int
    reward: float | None
    tokens: int
    loss: float
    norm: float
    first: TokenFinding | None
    parameter: str = ""

    @property
    def finite(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.first is None and math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True)
class MinibatchFinding:
    """One update: what its answers came to one by one, and all together, with the norms of the policy's gradient and
    the critic's (None where there was none, or nothing to learn)."""

    answers: list[AnswerFinding]
    loss: float | None
    norm: float | None
    critic_norm: float | None


def replay(trainer: Trainer, batch: Batch) -> list[MinibatchFinding]:
    """Take the step of `batch` as `Trainer.step` does, its updates included, and look at every answer before the update
    that it belongs to. The trainer holds other weights afterwards and makes no version of them."""
    trainer.version = batch.version
    credits = trainer._credits(batch)
    minibatches = trainer._minibatches(batch, credits)
    parts = split_evenly(len(batch.groups), trainer.settings.trainer.minibatches)
    singles = [_one_by_one(trainer, *trainer._samples(batch, credits, part)) for part in parts]
    anchors = _anchors(trainer, minibatches)
    single_anchors = _anchors(trainer, [minibatch for _, minibatch in singles])
    learning_rate = trainer._learning_rate()
    findings, made = [], 0
    for minibatch, anchor, (places, single), single_anchor in zip(
        minibatches, anchors, singles, single_anchors, strict=True
    ):
        progress = made / len(minibatches)
        answers = list(_answers(trainer, batch, places, single, single_anchor, progress))
        if not minibatch.micro_batches:
            findings.append(MinibatchFinding(answers, None, None, None))
            continue
        accumulated = trainer._accumulate(minibatch, anchor, progress, None)
        assert accumulated is not None  # nobody interrupts it
        norms = trainer.optimizer.norm(), trainer.critic.norm() if trainer.critic is not None else None
        norm, _ = trainer._apply(accumulated, learning_rate)
        made += norm is not None and norm > 0
        findings.append(MinibatchFinding(answers, accumulated.policy_loss + accumulated.critic_loss, *norms))
    return findings


def _one_by_one(
    trainer: Trainer, samples: dict[tuple[int, int], Sample], totals: object
) -> tuple[list[tuple[tuple[int, int], Sample]], Minibatch]:
    """Each sample in a micro-batch of its own, in a minibatch with the totals of the whole."""
    places, micro_batches = [], []
    for place, sample in samples.items():
        for m in make_micro_batches([sample], trainer.settings.trainer.token_budget, trainer.device):
            places.append((place, sample))
            micro_batches.append(m)
    return places, Minibatch([], micro_batches, totals)  # type: ignore[arg-type]


def _anchors(trainer: Trainer, minibatches: Sequence[Minibatch]) -> list[Anchors]:
    start = StartOfStep(trainer.version)
    algorithm = trainer.settings.algorithm
    return find_anchors(minibatches, algorithm, trainer.policy, trainer.reference, start, lambda: False)


def _answers(
    trainer: Trainer,
    batch: Batch,
    places: Sequence[tuple[tuple[int, int], Sample]],
    minibatch: Minibatch,
    anchor: Anchors,
    progress: float,
) -> Iterator[AnswerFinding]:
    for i, ((g, a), sample) in enumerate(places):
        group = batch.groups[g]
        trajectory = group.trajectories[a]
        alone = Minibatch([group], [minibatch.micro_batches[i]], minibatch.totals)
        seen: list[LossInputs] = []
        accumulated = trainer._accumulate(
            alone,
            Anchors([anchor.proximal[i]], [anchor.reference[i]], anchor.weight_limit),
            progress,
            None,
            seen.append,
        )
        assert accumulated is not None
        norm, parameter = trainer.optimizer.norm(), _broken_gradient(trainer)
        trainer.optimizer.zero_grad()
        if trainer.critic is not None:
            trainer.critic.zero_grad()
        yield AnswerFinding(
            group=group.id,
            prompt=group.prompt.id,
            answer=a,
            reward=trajectory.reward,
            tokens=len(trajectory.output_ids),
            loss=accumulated.policy_loss + accumulated.critic_loss,
            norm=norm,
            first=_first(seen[0], sample, len(trajectory.prompt_ids)),
            parameter=parameter,
        )


def _first(inputs: LossInputs, sample: Sample, prompt: int) -> TokenFinding | None:
    """The first token, in the answer's order, with a part that is not finite; of its parts the first in `ORDER`."""
    parts: dict[str, Tensor] = {name: p for name in ORDER if (p := getattr(inputs, name)) is not None}
    broken = torch.stack([~torch.isfinite(p.detach().float()) for p in parts.values()]).cpu()
    places = broken.any(0).nonzero()
    if not len(places):
        return None
    at = int(places[0])
    name = next(name for row, name in enumerate(parts) if broken[row, at])
    target = int(sample.targets[at])
    return TokenFinding(
        part=NAMES[name],
        value=float(parts[name][at].detach()),
        index=target - prompt,
        token=int(sample.tokens[target]),
        version=int(sample.versions[at]),
    )


def _broken_gradient(trainer: Trainer) -> str:
    """The name of the parameter nearest to the loss whose gradient is not finite; empty if there is none."""
    names = [
        name
        for name, master in trainer.optimizer.masters.items()
        if master.grad is not None and not bool(torch.isfinite(master.grad).all())
    ]
    return names[-1] if names else ""
