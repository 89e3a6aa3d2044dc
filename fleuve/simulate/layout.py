"""Which devices do what."""

from __future__ import annotations

from dataclasses import dataclass

from fleuve.config.settings import Settings
from fleuve.errors import UserError

ROLLOUT_SHARE = 0.75
"""Of the devices, when nobody says otherwise: what the published asynchronous runs use."""


@dataclass(frozen=True)
class Layout:
    """`engines` of `tensor_parallel` devices each, and `ranks` of `trainer_parallel` devices each. Colocated, both are
    made of the same devices and work in turn."""

    engines: int
    tensor_parallel: int
    ranks: int
    trainer_parallel: int
    colocated: bool

    @property
    def rollout_gpus(self) -> int:
        return self.engines * self.tensor_parallel

    @property
    def trainer_gpus(self) -> int:
        return self.ranks * self.trainer_parallel

    @property
    def gpus(self) -> int:
        return max(self.rollout_gpus, self.trainer_gpus) if self.colocated else self.rollout_gpus + self.trainer_gpus


def layout_of(settings: Settings) -> Layout:
    """The layout that `[simulate]` asks for, or else the run's own.

    Raises:
        UserError: the devices cannot be shared out so; says what could be.
    """
    simulate = settings.simulate
    colocated = settings.launch.placement == "colocated"
    tensor, trainer = _engine_size(settings), _rank_size(settings)
    if simulate.gpus is None:
        if simulate.rollout_gpus is not None:
            raise UserError(f"simulate.rollout_gpus = {simulate.rollout_gpus} needs simulate.gpus, the devices in all")
        ranks = max(1, settings.trainer.ranks // trainer)
        return Layout(settings.rollout.workers, tensor, ranks, trainer, colocated)
    gpus = simulate.gpus
    if colocated:
        rollout = simulate.rollout_gpus or gpus
        if rollout != gpus:
            raise UserError(
                f"simulate.rollout_gpus = {rollout}: colocated, all simulate.gpus = {gpus} generate; leave it out"
            )
        training = gpus
    else:
        rollout = simulate.rollout_gpus or _default_rollout(gpus, tensor, trainer)
        training = gpus - rollout
        if training < 1:
            raise UserError(
                f"simulate.rollout_gpus = {rollout} of simulate.gpus = {gpus}: none is left to train; "
                f"give it {gpus - 1} or fewer"
                if gpus > 1
                else 'simulate.gpus = 1: rollout and training need one each; set launch.placement = "colocated"'
            )
    for name, devices, key, size in (
        ("rollout", rollout, "tensor_parallel", tensor),
        ("training", training, "trainer_parallel", trainer),
    ):
        if devices % size:
            raise UserError(
                f"simulate.{key} = {size} does not divide the {devices} GPUs of {name}; "
                f"{max(d for d in range(1, size + 1) if devices % d == 0)} does"
            )
    return Layout(rollout // tensor, tensor, training // trainer, trainer, colocated)


def _engine_size(settings: Settings) -> int:
    rollout = settings.rollout
    own = rollout.vllm.tensor_parallel if rollout.engine == "vllm" else 1
    return settings.simulate.tensor_parallel or own


def _rank_size(settings: Settings) -> int:
    """Devices that share a micro-batch: there is one price for sharing its tokens and for sharing its layers."""
    trainer = settings.trainer
    return settings.simulate.trainer_parallel or trainer.tensor_parallel * trainer.context_parallel


def _default_rollout(gpus: int, tensor: int, trainer: int) -> int:
    """About three quarters, in whole engines, with whole ranks left if that can be."""
    fitting = [r for r in range(tensor, gpus, tensor) if (gpus - r) % trainer == 0]
    return min(fitting, key=lambda r: abs(r - ROLLOUT_SHARE * gpus)) if fitting else max(1, int(ROLLOUT_SHARE * gpus))
