"""The critic: a value head on a decoder, and the optimiser that teaches it.

Its backbone is its own (a second model, all of whose weights learn values) or the policy's (the head reads the states
that the policy predicts from: almost free, but the value loss pulls at the policy's weights too).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fleuve.algorithms.values import ValueSums, value_loss
from fleuve.errors import UserError
from fleuve.modeling.forward import base_model
from fleuve.modeling.loading import load_model
from fleuve.train.gradient_scale import scale_gradient
from fleuve.train.microbatch import MicroBatch
from fleuve.train.optimizer import MasterOptimizer
from fleuve.train.policy import Policy, checkpoint_layers, states_before_targets

_HEAD = ("head.weight", "head.bias")


class Critic:
    """V(state before each learnt token), in fp32.

    One forward pass of a micro-batch: `values`, then `loss`; its backward pass (alone, or of a sum with the policy's
    loss: with a shared backbone it must be one backward pass of the sum) adds to gradients; `step` applies them. As
    everywhere, values without gradient are had under `torch.no_grad()`.

    With a shared backbone the head gets the value loss's gradient whole, whatever the coefficient: only what flows on
    into the policy's weights is scaled. Those are the policy's optimiser's to move; the critic's moves the head alone.

    Args:
        policy: says where the critic lives, and lends its backbone if that is shared.
        path: the model directory or name that an own backbone is loaded from; a shared one does not read it.
        clip: of the value loss, in units of reward (None: off).
        coefficient: the share of the value loss's gradient that reaches a shared backbone.
        warmup_steps: how many steps only the critic learns; see `warming_up`.
        dtype: an own backbone computes in it. The head computes in fp32 always: a value is one number, and in bf16 it
            would have two to three digits.
        activation_checkpointing: of an own backbone.

    Raises:
        UserError: the model in `path` cannot be opened, or has fewer tokens than the policy's.
    """

    def __init__(
        self,
        policy: Policy,
        path: str,
        *,
        backbone: Literal["own", "shared"] = "own",
        learning_rate: float = 1e-5,
        clip: float | None = 0.2,
        coefficient: float = 0.1,
        warmup_steps: int = 0,
        dtype: torch.dtype = torch.float32,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        activation_checkpointing: bool = False,
    ) -> None:
        self.learning_rate = learning_rate
        self.clip = clip
        self.coefficient = coefficient
        self.warmup_steps = warmup_steps
        self.max_grad_norm = max_grad_norm
        self._policy = policy if backbone == "shared" else None
        self.model = _with_head(policy.model) if backbone == "shared" else _own_model(policy.model, path)
        if backbone == "own" and activation_checkpointing:
            checkpoint_layers(self.model.backbone)
        self.optimizer = MasterOptimizer(
            self.model, dtype, betas=betas, eps=eps, weight_decay=weight_decay, in_float32=_HEAD
        )

    @property
    def shared(self) -> bool:
        """Whether the backbone is the policy's."""
        return self._policy is not None

    def warming_up(self, version: int) -> bool:
        """Whether the step that starts from `version` teaches only the critic. A shared backbone must then not move
        either: run the policy under `torch.no_grad()` and give `values` its hidden states."""
        return version < self.warmup_steps

    def values(self, m: MicroBatch, hidden: Tensor | None = None) -> Tensor:
        """V before each learnt token, with gradient: `[targets]`, fp32.

        Args:
            hidden: the policy's hidden states of `m` (`PolicyOutput.hidden`), which save a shared critic a forward
                pass. A critic with its own backbone has its own.
        """
        if self._policy is None:
            return self._head(states_before_targets(self.model, m))
        states = self._policy.hidden(m) if hidden is None else hidden
        return self._head(scale_gradient(states, self.coefficient))

    def loss(
        self, values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, denominator: float
    ) -> tuple[Tensor, ValueSums]:
        """`algorithms.values.value_loss` with this critic's clip. With a shared backbone, not multiplied with the
        coefficient: the gradient already is."""
        return value_loss(values, old_values, returns, loss_mask, denominator=denominator, clip=self.clip)

    def step(self, usable: bool = True) -> tuple[float, bool]:
        """One update from the gradients added up; see `MasterOptimizer.step`. Its norm is `critic/grad_norm`."""
        return self.optimizer.step(self.learning_rate, self.max_grad_norm, usable)

    def norm(self) -> float:
        """Of the gradients added up so far."""
        return self.optimizer.norm()

    def zero_grad(self) -> None:
        """Forget the gradients added up so far."""
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Everything that learns here, and its optimiser's state; of a shared backbone only the head."""
        return self.optimizer.state()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned.

        Raises:
            KeyError: `tensors` are those of a critic with another backbone.
            RuntimeError: their shapes are others.
        """
        theirs = {name for name in tensors if name.startswith("master/")}
        ours = {f"master/{name}" for name in self.optimizer.masters}
        if odd := sorted(theirs ^ ours):
            raise KeyError(odd[0])
        self.optimizer.restore(tensors)

    def _head(self, states: Tensor) -> Tensor:
        values: Tensor = self.model.head(states.float())
        return values.squeeze(-1)


class _ValueModel(nn.Module):
    """A decoder without its output head, and a value head. `backbone` is None where it is somebody else's."""

    base_model_prefix = "backbone"
    """By this name `modeling.forward` finds the layers."""

    def __init__(self, backbone: Any, width: int, device: torch.device) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(width, 1, device=device, dtype=torch.float32)
        # Zero, not random: the first advantages are then the plain returns. Random weights would add noise as large as
        # the hidden states, which foretells nothing, to every one of them, and pull at the backbone in a random
        # direction before the head knows anything. With one output there is no symmetry to break: the head's own
        # gradient, error × hidden state, is not zero, and the backbone's follows as soon as the head has moved.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


def _with_head(model: Any, backbone: Any = None) -> _ValueModel:
    """A head that fits the hidden states of `model`, a decoder, on its device."""
    weight = model.get_output_embeddings().weight
    return _ValueModel(backbone, weight.shape[1], weight.device)


def _own_model(policy: Any, path: str) -> _ValueModel:
    """A second decoder, in fp32, a value head in place of its output head."""
    ours: Any = load_model(path, torch.float32, str(policy.get_output_embeddings().weight.device))
    have, need = (model.get_input_embeddings().weight.shape[0] for model in (ours, policy))
    if have < need:
        raise UserError(f"critic.path = {path} knows {have} tokens, the policy {need}: it needs the same tokenizer")
    return _with_head(ours, base_model(ours))
