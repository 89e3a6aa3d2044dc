"""AdamW over fp32 master weights, whatever the model computes in.

In bf16 the model's own parameters are copies of the masters. A hook moves each gradient into its master's fp32 sum as
soon as the backward pass has made it, so gradients of many micro-batches add up without bf16's rounding, and no bf16
gradient outlives its layer. In fp32 the parameters are the masters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from fleuve.train.layout import Layout

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class MasterOptimizer:
    """Owns the weights of `model` that learn (in fp32 so far), which compute in `dtype` from here on.

    Args:
        weight_decay: applies to matrices; norms and biases (one-dimensional) do not decay.
        in_float32: names of parameters that compute in fp32 whatever `dtype` is.
    """

    layout = Layout()
    """Which parts of the weights it owns, of all of which ranks hold some."""

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        in_float32: Collection[str] = (),
    ) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters: dict[str, Tensor] = dict(self.parameters)
        if dtype != torch.float32:
            for name, parameter in self.parameters.items():
                if name in in_float32:
                    continue
                master = parameter.detach().clone()
                master.grad = torch.zeros_like(master)
                # Only parameters: buffers (rotary frequencies) stay in fp32, as `from_pretrained` leaves them.
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(_moves_gradient_to(master))
                self.masters[name] = master
        self._adamw = adamw(self.masters, betas, eps, weight_decay)

    def zero_grad(self) -> None:
        """Forget the gradients summed up so far."""
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.zero_()

    def norm(self) -> float:
        """The global norm of the summed gradients."""
        return float(torch.nn.utils.get_total_norm([m.grad for m in self.masters.values() if m.grad is not None]))

    @torch.no_grad()
    def step(self, learning_rate: float, max_grad_norm: float, usable: bool = True) -> tuple[float, bool]:
        """One update from the summed gradients, their global norm clipped; then forget them (and only that, if they are
        not `usable`).

        Returns:
            The norm before clipping, and whether the update took place: not when the norm is NaN or infinite either,
            nor when it is 0, since AdamW would move the weights by its momentum alone.
        """
        norm = self.norm()
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        updated = usable and math.isfinite(norm) and norm > 0
        if updated:
            if norm > max_grad_norm:
                torch._foreach_mul_(gradients, max_grad_norm / (norm + 1e-6))
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self._refresh()
        self.zero_grad()
        return norm, updated

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The weights as rollout workers get them, by `named_parameters` names."""
        return ((name, master.detach().to(dtype)) for name, master in self.masters.items())

    def state(self) -> dict[str, Tensor]:
        """Masters and moments, flat, by `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`."""
        tensors = {f"master/{name}": m.detach() for name, m in self.masters.items()}
        for name, master in self.masters.items():
            moments = self._adamw.state.get(master, {})
            tensors |= {f"{key}/{name}": moments[key] for key in _MOMENTS if key in moments}
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned.

        Raises:
            KeyError: a parameter has no master in `tensors`.
        """
        for name, master in self.masters.items():
            master.copy_(tensors[f"master/{name}"])
            moments = {
                key: tensors[f"{key}/{name}"].clone().to(master.device)
                for key in _MOMENTS
                if f"{key}/{name}" in tensors
            }
            self._adamw.state.pop(master, None)
            if moments:
                self._adamw.state[master] = moments
        self._refresh()
        self.zero_grad()

    def _refresh(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter is not self.masters[name]:
                parameter.data.copy_(self.masters[name])


def adamw(
    masters: Mapping[str, Tensor], betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Over `masters`, of which matrices decay and norms and biases (one-dimensional) do not."""
    matrices = [m for m in masters.values() if m.ndim > 1]
    vectors = [m for m in masters.values() if m.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.0,
        betas=betas,
        eps=eps,
        fused=True,
    )


def _moves_gradient_to(master: Tensor):  # type: ignore[no-untyped-def]
    def move(parameter: Tensor) -> None:
        assert master.grad is not None
        assert parameter.grad is not None
        master.grad.add_(parameter.grad)
        parameter.grad = None

    return move
