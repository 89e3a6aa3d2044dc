"""The plans that `fleuve plan` looks at: every way to share devices out that memory allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fleuve.config.settings import Settings
from fleuve.simulate.engine_costs import model_shape_of
from fleuve.simulate.hardware import load_hardware
from fleuve.simulate.layout import Layout, layout_of
from fleuve.simulate.memory import EngineMemory, TrainerMemory, engine_memory, trainer_memory

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

    def with_staleness(self, max_staleness: int) -> Candidate:
        return replace(self, max_staleness=max_staleness)

    def apply(self, settings: Settings) -> Settings:
        """The run that follows this plan. With all that a real run needs to agree: workers, ranks, caches, budgets."""
        rollout, trainer = settings.rollout, settings.trainer
        colocated, several = self.rollout_gpus is None, (settings.simulate.gpus or 1) > 1
        # Who computes on several GPUs needs somebody to give each process its own; devices in turn are one machine's.
        backend = "ray" if several and not colocated and rollout.engine == "vllm" else settings.launch.backend
        placement = "colocated" if colocated else "disaggregated"
        planned = settings.model_copy(
            update={
                "rollout": rollout.model_copy(
                    update={"vllm": rollout.vllm.model_copy(update={"tensor_parallel": self.tensor_parallel})}
                ),
                "control": settings.control.model_copy(update={"max_staleness": self.max_staleness}),
                "trainer": trainer.model_copy(
                    update={
                        "tensor_parallel": self.trainer_parallel,
                        "token_budget": self.token_budget,
                        "activation_checkpointing": self.recompute_activations,
                    }
                ),
                "launch": settings.launch.model_copy(update={"backend": backend, "placement": placement}),
                "simulate": settings.simulate.model_copy(
                    update={"rollout_gpus": self.rollout_gpus, "tensor_parallel": None, "trainer_parallel": None}
                ),
            }
        )
        layout = layout_of(planned)
        return planned.model_copy(
            update={
                "rollout": planned.rollout.model_copy(update={"workers": layout.engines}),
                "trainer": planned.trainer.model_copy(update={"ranks": layout.trainer_gpus}),
            }
        )


@dataclass(frozen=True)
class Misfit:
    """Why a candidate does not fit, and by what factor: the least is the nearest to fitting."""

    reason: str
    factor: float


def longest_sequence(settings: Settings) -> int:
    """Tokens of the longest prompt and answer."""
    return settings.simulate.prompt_tokens + settings.rollout.max_new_tokens


def misfit(settings: Settings) -> Misfit | None:
    """What of the run is furthest from fitting into its devices' memory; None if all of it fits."""
    hardware, shape, layout = load_hardware(settings.simulate.hardware), model_shape_of(settings), layout_of(settings)
    engine = _engine_misfit(settings, engine_memory(settings, hardware, shape, layout), layout)
    trainer = _trainer_misfit(settings, trainer_memory(settings, hardware, shape, layout), layout)
    if engine is None or trainer is None:
        return engine or trainer
    # Colocated, it is the trainer's own state that the engine has no room beside.
    worse = trainer if layout.colocated or trainer.factor > engine.factor else engine
    return Misfit(worse.reason, max(engine.factor, trainer.factor))


def _engine_misfit(settings: Settings, memory: EngineMemory, layout: Layout) -> Misfit | None:
    longest = longest_sequence(settings)
    if memory.kv_tokens >= longest:
        return None
    beside = f" and {_gb(memory.state)} of the trainer's, which shares it," if memory.state else ""
    return Misfit(
        f"an engine on {layout.tensor_parallel} has {_gb(memory.weights)} of weights{beside} in each device's "
        f"{_gb(memory.available)}, which leaves room for {max(memory.kv_tokens, 0):,} tokens of KV cache; the longest "
        f"sequence has {longest:,}",
        1 + (longest - memory.kv_tokens) * memory.kv_token / memory.available,
    )


def _trainer_misfit(settings: Settings, memory: TrainerMemory, layout: Layout) -> Misfit | None:
    if memory.fits:
        return None
    rest = memory.total - memory.state - memory.activations
    return Misfit(
        f"training on {layout.trainer_gpus} needs {_gb(memory.total)} in each device's {_gb(memory.available)}: "
        f"{_gb(memory.state)} for weights, gradients and optimiser, {_gb(memory.activations)} for the activations of "
        f"{settings.trainer.token_budget:,} tokens, {_gb(rest)} beside",
        memory.total / memory.available,
    )


def candidates(settings: Settings, most_stale: int) -> Iterator[Candidate]:
    """Every layout of `simulate.gpus` devices with each token budget, activations recomputed or kept; memory is not yet
    looked at. Staleness is the most that is allowed: less of it is looked at later."""
    longest = longest_sequence(settings)
    for tensor in _engine_sizes(settings):
        for trainer in _rank_sizes(settings):
            for rollout in _splits(settings, tensor, trainer):
                for budget in BUDGETS:
                    for again in (False, True):
                        yield Candidate(rollout, tensor, trainer, most_stale, budget * longest, again)


def largest_size(settings: Settings) -> int:
    """Devices of the largest engine or rank that is looked at."""
    return max(*_engine_sizes(settings), *_rank_sizes(settings))


def _engine_sizes(settings: Settings) -> list[int]:
    """vLLM holds key-value heads more than once where an engine has more devices than they are."""
    return _sizes(settings, model_shape_of(settings).heads if settings.rollout.engine == "vllm" else 1)


def _rank_sizes(settings: Settings) -> list[int]:
    """The trainer's parts of a layer are of whole key-value heads (`trainer.tensor_parallel`)."""
    shape = model_shape_of(settings)
    return _sizes(settings, math.gcd(shape.heads, shape.kv_heads) if _shared_out(settings) else 1)


def _sizes(settings: Settings, heads: int) -> list[int]:
    most = min(load_hardware(settings.simulate.hardware).node, settings.simulate.gpus or 1)
    return [size for size in (1, 2, 4, 8) if size <= most and heads % size == 0]


def _shared_out(settings: Settings) -> bool:
    """Whether the trainer can have more than one device: a critic's weights are not shared out, nor are adapters."""
    return settings.algorithm.baseline != "critic" and not settings.lora.rank


def staleness_below(most: int) -> list[int]:
    """The bounds that are worth a look, the largest first: `most`, and the usual ones below it."""
    return [most, *sorted((s for s in STALENESS if s < most), reverse=True)]


def _splits(settings: Settings, tensor: int, trainer: int) -> list[int | None]:
    """Devices for rollout, in whole engines, that leave whole ranks; on many nodes in whole nodes. None: colocated."""
    gpus, node = settings.simulate.gpus or 1, load_hardware(settings.simulate.hardware).node
    unit = math.lcm(tensor, trainer)
    if gpus >= 8 * node and gpus % node == 0:
        unit = math.lcm(unit, node)
    whole = [r for r in range(tensor, gpus, tensor) if (gpus - r) % trainer == 0 and (r % unit == 0 or gpus <= 16)]
    if not _shared_out(settings):
        whole = [gpus - 1] if gpus > 1 and (gpus - 1) % tensor == 0 else []
    if len(whole) > SPLITS:
        whole = [whole[round(i * (len(whole) - 1) / (SPLITS - 1))] for i in range(SPLITS)]
    in_turn = gpus % tensor == 0 and gpus % trainer == 0 and (_shared_out(settings) or gpus == 1)
    return [*whole, *([None] if in_turn else [])]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size >= 10e9 else f"{size / 1e9:.1f} GB"
