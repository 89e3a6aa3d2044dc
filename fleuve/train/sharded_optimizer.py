"""AdamW over this rank's share of the weights: masters, gradients and moments are fp32 and lie on no other rank."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fleuve.train.optimizer import MasterOptimizer, adamw
from fleuve.train.sharding import ShardedModel


class ShardedOptimizer(MasterOptimizer):
    """Owns the weights of `model`. `step`, `norm` and `weights` are called by all ranks together, and norms are those
    of the whole gradient; `state` and `restore` are of this rank's parts."""

    def __init__(self, model: ShardedModel, *, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.model = model
        self.layout = model.layout
        self.parameters = {}  # none that are copies of their masters
        with torch.no_grad():
            self.masters = {name: parameter.to_local() for name, parameter in model.parameters.items()}
        self._adamw = adamw(self.masters, betas, eps, weight_decay)

    def zero_grad(self) -> None:
        for name, master in self.masters.items():
            master.grad = self.model.parameters[name].grad = None

    def norm(self) -> float:
        self._take_gradients()
        ranks = self.model.ranks
        own = [
            m.grad for name, m in self.masters.items() if m.grad is not None and self.layout.counts(name, ranks.rank)
        ]
        return math.sqrt(ranks.total(float(torch.nn.utils.get_total_norm(own)) ** 2))

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        return self.model.weights(dtype)

    def _refresh(self) -> None:
        self.model.refresh()

    def _take_gradients(self) -> None:
        """FSDP leaves the sums beside its own parameters."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.grad = self.model.gradient(name)
