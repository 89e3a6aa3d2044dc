"""The fixed policies that a step's updates are held to: the proximal one and the reference, on the step's own tokens.

Both are evaluated before the first update, while the weights are still those of the start of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fleuve.algorithms.corrections import second_moment_limit
from fleuve.algorithms.proximal import interpolate
from fleuve.config.settings import AlgorithmSettings
from fleuve.train.metrics import StartOfStep
from fleuve.train.microbatch import MicroBatch, Minibatch
from fleuve.train.policy import Policy
from fleuve.train.ranks import Ranks


@dataclass(frozen=True)
class Anchors:
    """Of one minibatch, a tensor `[targets]` for each micro-batch. None in `proximal` stands for "from the current
    policy's own": see `proximal_of`. `weight_limit` is second-moment masking's, over the tokens that have a gradient
    to mask."""

    proximal: list[Tensor | None]
    reference: list[Tensor | None]
    weight_limit: float | None = None


def find_anchors(
    minibatches: Sequence[Minibatch],
    algorithm: AlgorithmSettings,
    policy: Policy,
    reference: Policy | None,
    start: StartOfStep,
    stopped: Callable[[], bool],
    ranks: Ranks | None = None,
) -> list[Anchors]:
    """Evaluate what the settings ask for; `start` is told of every forward pass of the policy. `stopped` says the same
    on all `ranks`.

    Until the first update the current policy *is* the proximal one, so the first minibatch's own forward pass gives
    both, and only the others need one more (the first too, where its weights must be known before it begins).

    Returns:
        One for each minibatch; fewer if `stopped()` in between.
    """
    anchors: list[Anchors] = []
    first = True
    for minibatch in minibatches:
        needs_pass = algorithm.proximal == "recompute" and (not first or algorithm.cap == "second_moment")
        first = first and not minibatch.micro_batches  # one without anything to learn makes no update
        proximal: list[Tensor | None] = []
        referred: list[Tensor | None] = []
        for m in minibatch.micro_batches:
            if stopped():
                return anchors
            proximal.append(_recomputed(m, policy, start) if needs_pass else None)
            referred.append(_evaluated(m, reference) if reference is not None and algorithm.kl_in == "loss" else None)
        limit = _weight_limit(minibatch, proximal, algorithm, ranks or Ranks())
        anchors.append(Anchors(proximal, referred, limit))
    return anchors


def proximal_of(
    m: MicroBatch,
    recomputed: Tensor | None,
    logprobs: Tensor,
    algorithm: AlgorithmSettings,
    version: int,
    progress: float,
) -> Tensor:
    """What the clip is centred on, `[targets]`, in a step that starts from `version`.

    Args:
        recomputed: as `find_anchors` gave it.
        logprobs: of the current policy.
        progress: the share of the step's updates that have moved the policy.
    """
    if algorithm.proximal == "behaviour":
        return m.behaviour
    if algorithm.proximal == "interpolate":
        return interpolate(logprobs, m.behaviour, version - m.versions, progress)
    return logprobs.detach() if recomputed is None else recomputed


@torch.no_grad()
def _recomputed(m: MicroBatch, policy: Policy, start: StartOfStep) -> Tensor:
    logprobs, entropies = policy.logprobs(m, entropy=True)
    if not m.dummy:
        start.add(m, logprobs, entropies)
    return logprobs


@torch.no_grad()
def _evaluated(m: MicroBatch, policy: Policy) -> Tensor:
    return policy.logprobs(m)[0]


def _weight_limit(
    minibatch: Minibatch, proximal: Sequence[Tensor | None], algorithm: AlgorithmSettings, ranks: Ranks
) -> float | None:
    if algorithm.cap != "second_moment" or not minibatch.micro_batches:
        return None
    parts = zip(proximal, minibatch.micro_batches, strict=True)
    weights = [(p - m.behaviour)[m.advantages != 0] for p, m in parts if p is not None]  # a dummy has none
    return second_moment_limit(ranks.joined(torch.cat(weights)), algorithm.second_moment_budget)
