"""What the updates of a step came to: losses, norms and sums, gathered minibatch by minibatch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fleuve.algorithms.diagnostics import LossSums
from fleuve.algorithms.values import ValueSums
from fleuve.train.ranks import Ranks


@dataclass
class Accumulated:
    """One minibatch's losses, its micro-batches added up. The sums are None until there is one."""

    policy_loss: float = 0.0
    critic_loss: float = 0.0
    sums: LossSums | None = None
    value_sums: ValueSums | None = None

    @property
    def finite(self) -> bool:
        """Whether what it was added up from can be learnt from."""
        return math.isfinite(self.policy_loss) and math.isfinite(self.critic_loss)

    def add_policy(self, loss: Tensor, sums: LossSums) -> None:
        """One micro-batch of the policy's."""
        self.policy_loss += float(loss.detach())
        self.sums = sums if self.sums is None else self.sums + sums

    def add_critic(self, loss: Tensor, sums: ValueSums) -> None:
        """And the critic's."""
        self.critic_loss += float(loss.detach())
        self.value_sums = sums if self.value_sums is None else self.value_sums + sums

    def over(self, ranks: Ranks) -> Accumulated:
        """The same over all ranks, one of which may have had nothing but dummies."""
        if ranks.count == 1:
            return self
        assert self.value_sums is None  # a critic is on one rank only
        none = LossSums.none()
        own = none if self.sums is None else self.sums
        policy_loss, *sums = ranks.sum([self.policy_loss, *own.sums.flatten().tolist()])
        largest = ranks.maximum(own.weight_max.tolist())
        table = torch.tensor(sums, dtype=torch.float64).view_as(none.sums)
        return Accumulated(policy_loss, sums=LossSums(table, torch.tensor(largest, dtype=torch.float64)))


@dataclass
class UpdateRecord:
    """The updates of one step. `updates` counts those that were computed, also if they were `refused`, for a NaN or an
    infinity, or `idle`, of a gradient of zero. `in_a_row` counts those refused since the latest that was not, which may
    lie in an earlier step."""

    learning_rate: float
    in_a_row: int = 0
    skipped: int = 0
    refused: int = 0
    idle: int = 0
    updates: int = 0
    whole: Accumulated = field(default_factory=Accumulated)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    critic_norms: list[float] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Minibatches that are dealt with."""
        return self.skipped + self.updates

    @property
    def made(self) -> int:
        """Updates that took place."""
        return self.updates - self.refused - self.idle

    def skip(self) -> None:
        """A minibatch without anything to learn."""
        self.skipped += 1

    def add(self, minibatch: Accumulated, norm: float | None, critic_norm: float | None) -> None:
        """A minibatch and the norms of its gradients: None for who was not to be updated, NaN for who was refused."""
        self.updates += 1
        if any(n is not None and math.isnan(n) for n in (norm, critic_norm)):
            self.refused += 1
            self.in_a_row += 1
            return
        self.in_a_row = 0
        self.idle += not any((norm, critic_norm))
        self.losses.append(minibatch.policy_loss)
        self.norms += [] if norm is None else [norm]
        self.critic_norms += [] if critic_norm is None else [critic_norm]
        whole, sums, value_sums = self.whole, minibatch.sums, minibatch.value_sums
        if sums is not None:
            whole.sums = sums if whole.sums is None else whole.sums + sums
        if value_sums is not None:
            whole.value_sums = value_sums if whole.value_sums is None else whole.value_sums + value_sums

    def metrics(self) -> dict[str, float]:
        """Means over the updates and over their tokens, by name; what was measured on nothing is absent."""
        metrics = {
            "loss/learning_rate": self.learning_rate,
            "loss/skipped_minibatches": float(self.skipped + self.idle),
            "loss/skipped_nonfinite": float(self.refused),
            "loss/nonfinite_in_a_row": float(self.in_a_row),
        }
        if self.skipped and not self.updates:  # nothing to learn: that is a loss and a gradient of zero
            metrics |= {"loss/policy": 0.0, "loss/grad_norm": 0.0}
        means = {"loss/policy": self.losses, "loss/grad_norm": self.norms, "critic/grad_norm": self.critic_norms}
        metrics |= {name: sum(values) / len(values) for name, values in means.items() if values}
        if self.whole.sums is not None:
            metrics |= self.whole.sums.metrics()
        if self.whole.value_sums is not None:
            metrics |= self.whole.value_sums.metrics()
        return metrics
