"""The plans that `fleuve plan` looks at: every way to share devices out that memory allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fleuve.config.settings import Settings
from fleuve.simulate.engine_costs import model_shape_of
from fleuve.simulate.hardware import load_hardware
from fleuve.simulate.layout import layout_of
from fleuve.simulate.memory import engine_memory, trainer_memory

SPLITS = 24
"""Ways to split the devices that are looked at, at most, for each size of engine and rank."""

BUDGETS = (1, 2, 4)
"""Token budgets that are looked at, in longest sequences."""

STALENESS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Candidate:
    """`rollout_gpus` is None where rollout and training take turns on all devices (colocated)."""

    rollout_gpus: int | None
    tensor_parallel: int
    trainer_parallel: int
    max_staleness: int
    token_budget: int
    recompute_activations: bool

    @property
    def layout(self) -> tuple[object, ...]:
        """What makes two candidates different plans, and not variants of one."""
        return self.rollout_gpus, self.tensor_parallel, self.trainer_parallel

    def with_staleness(self, max_staleness: int) -> Candidate:
        return replace(self, max_staleness=max_staleness)

    def apply(self, settings: Settings) -> Settings:
        """The run that follows this plan. With all that a real run needs to agree: workers, caches, budgets."""
        update = {"max_staleness": self.max_staleness}
        planned = settings.model_copy(
            update={
                "control": settings.control.model_copy(update=update),
                "trainer": settings.trainer.model_copy(
                    update={
                        "token_budget": self.token_budget,
                        "activation_checkpointing": self.recompute_activations,
                    }
                ),
                "launch": settings.launch.model_copy(
                    update={"placement": "colocated" if self.rollout_gpus is None else "disaggregated"}
                ),
                "simulate": settings.simulate.model_copy(
                    update={
                        "rollout_gpus": self.rollout_gpus,
                        "tensor_parallel": self.tensor_parallel,
                        "trainer_parallel": self.trainer_parallel,
                    }
                ),
            }
        )
        workers = layout_of(planned).engines
        return planned.model_copy(update={"rollout": planned.rollout.model_copy(update={"workers": workers})})


@dataclass(frozen=True)
class Misfit:
    """Why a candidate does not fit, and by what factor: the least is the nearest to fitting."""

    reason: str
    factor: float


def longest_sequence(settings: Settings) -> int:
    """Tokens of the longest prompt and answer."""
    return settings.simulate.prompt_tokens + settings.rollout.max_new_tokens


def misfit(settings: Settings) -> Misfit | None:
    """Why the run does not fit into its devices' memory; None if it does."""
    hardware, shape, layout = load_hardware(settings.simulate.hardware), model_shape_of(settings), layout_of(settings)
    engine = engine_memory(settings, hardware, shape, layout)
    longest = longest_sequence(settings)
    need = engine.available + (longest - engine.kv_tokens) * engine.kv_token
    if engine.kv_tokens < longest:
        shared = f" and {_gb(engine.state)} of the colocated trainer's state" if engine.state else ""
        reason = (
            f"an engine on {layout.tensor_parallel} has {_gb(engine.weights)} of weights{shared} in each device's "
            f"{_gb(engine.available)}, and room for {max(engine.kv_tokens, 0):,} tokens of KV cache where the longest "
            f"sequence has {longest:,}"
        )
        return Misfit(reason, need / engine.available)
    trainer = trainer_memory(settings, hardware, shape, layout)
    if not trainer.fits:
        reason = (
            f"training on {layout.trainer_gpus} needs {_gb(trainer.total)} in each device's {_gb(trainer.available)}: "
            f"{_gb(trainer.state)} for weights, gradients and optimiser, {_gb(trainer.activations)} for activations "
            f"of {settings.trainer.token_budget:,} tokens, {_gb(trainer.total - trainer.state - trainer.activations)} "
            "beside"
        )
        return Misfit(reason, trainer.total / trainer.available)
    return None


def candidates(settings: Settings, most_stale: int) -> Iterator[Candidate]:
    """Every layout of `simulate.gpus` devices with each token budget, activations recomputed or kept; memory is not yet
    looked at. Staleness is the most that is allowed: less of it is looked at later."""
    gpus, node = settings.simulate.gpus or 1, load_hardware(settings.simulate.hardware).node
    sizes = [size for size in (1, 2, 4, 8) if size <= min(node, gpus)]
    longest = longest_sequence(settings)
    for tensor in sizes:
        for trainer in sizes:
            splits: list[int | None] = list(_splits(gpus, tensor, trainer, node))
            if gpus % tensor == 0 and gpus % trainer == 0:
                splits.append(None)
            for rollout in splits:
                for budget in BUDGETS:
                    for again in (False, True):
                        yield Candidate(rollout, tensor, trainer, most_stale, budget * longest, again)


def staleness_below(most: int) -> list[int]:
    """The bounds that are worth a look, the largest first: `most`, and the usual ones below it."""
    return [most, *sorted((s for s in STALENESS if s < most), reverse=True)]


def _splits(gpus: int, tensor: int, trainer: int, node: int) -> list[int]:
    """Devices for rollout, in whole engines, that leave whole ranks; on many nodes in whole nodes."""
    unit = math.lcm(tensor, trainer)
    if gpus >= 8 * node and gpus % node == 0:
        unit = math.lcm(unit, node)
    whole = [r for r in range(tensor, gpus, tensor) if (gpus - r) % trainer == 0 and (r % unit == 0 or gpus <= 16)]
    if len(whole) <= SPLITS:
        return whole
    return [whole[round(i * (len(whole) - 1) / (SPLITS - 1))] for i in range(SPLITS)]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size >= 10e9 else f"{size / 1e9:.1f} GB"
