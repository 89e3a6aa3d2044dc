"""The published runs (AReaL, arXiv 2505.24298) as settings, and their simulation on a slice of the cluster.

A slice of 1/S has a share 1/S of the devices and of the batch: every engine and every rank of the trainer has the same
work as on the whole cluster, and tokens a second are S times those of the slice. What differs is the luck of the
longest answer among fewer, and that is small where answers are cut off at the same length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fleuve.config.settings import Settings
from fleuve.simulate.engine_costs import EngineCosts
from fleuve.simulate.layout import layout_of
from fleuve.simulate.result import SimulationResult
from fleuve.simulate.run import simulate

NODE, GROUPS, SAMPLES, MINIBATCHES, LONGEST, PROMPT = 8, 512, 16, 4, 27_648, 256
PATIENCE = 1e6
"""Seconds of every deadline: what the paper's runs have for their steps is not known."""
UNBOUNDED = 32
"""η without a bound: more batches than the pipeline of any run here holds. (A real bound of ∞ admits the whole run's
prompts at its start, and they wait at the engines.)"""


@dataclass(frozen=True)
class Published:
    """One row of the paper's table. `other_hours` is another synchronous system's (verl).

    How models are split is not in it. Here: over the fewest devices on which half of the memory is left for caches, or
    for activations. An engine holds weights in bf16. A rank of the trainer holds those and gradients in fp32, 6 bytes a
    parameter: the paper's trainer (Megatron) shards no more than the optimiser over ranks.
    """

    name: str
    model: str
    nodes: int
    steps: int
    eta: int
    tensor_parallel: int
    trainer_parallel: int
    sync_hours: float
    async_hours: float
    other_hours: float

    @property
    def code(self) -> bool:
        return self.name.endswith("code")

    @property
    def speedup(self) -> float:
        return self.sync_hours / self.async_hours

    @property
    def sync_step(self) -> float:
        """Seconds."""
        return self.sync_hours * 3600 / self.steps

    @property
    def async_step(self) -> float:
        """Seconds."""
        return self.async_hours * 3600 / self.steps


PUBLISHED = (
    Published("1.5B maths", "qwen-1.5b", 16, 250, 8, 1, 1, 41.0, 14.8, 33.6),
    Published("7B maths", "qwen-7b", 24, 250, 8, 1, 2, 57.7, 25.4, 52.1),
    Published("14B code", "qwen-14b", 32, 80, 4, 1, 4, 48.8, 21.9, 44.4),
    Published("32B code", "qwen-32b", 48, 60, 4, 2, 8, 51.1, 31.1, 46.4),
)
ETAS = {0: 128.7, 1: 269.3, 2: 356.6, 4: 356.6, 8: 371.7, 16: 382.4, UNBOUNDED: 396.8}
"""Thousand trained tokens a second of the 1.5B model, by η."""
INTERRUPTION = {"qwen-1.5b": 0.12, "qwen-7b": 0.17}
"""What interruption adds to generated tokens a second on 4 nodes."""


@dataclass(frozen=True)
class Constants:
    """What is fitted, see `paper`; all else is `[simulate]`'s default. `mean` and `code_mean` are of answers."""

    mean: float
    code_mean: float
    decode_overhead: float
    switch_seconds: float
    train_flops_share: float
    train_half_width: float


def cluster(
    row: Published, constants: Constants, *, gpus: int | None = None, changes: Mapping[str, object] | None = None
) -> Settings:
    """The asynchronous run of `row`, on another number of devices if given; `changes` by dotted names."""
    gpus = gpus or row.nodes * NODE
    values: dict[str, dict[str, object]] = {
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "rollout": {
            "engine": "vllm",
            "group_size": SAMPLES,
            "max_new_tokens": LONGEST,
            "dtype": "bfloat16",
            "request_timeout": PATIENCE,
            "update_timeout": PATIENCE,
        },
        "control": {
            "batch_size": GROUPS,
            "max_staleness": row.eta,
            "overdue": "train",  # the paper's
            "group_timeout": PATIENCE,
        },
        "trainer": {
            "minibatches": MINIBATCHES,
            "dtype": "bfloat16",
            "token_budget": 32_768,
            "activation_checkpointing": True,
            "step_timeout": PATIENCE,
        },
        "launch": {},
        "simulate": {
            "model": row.model,
            "hardware": "h800",
            "gpus": gpus,
            "rollout_gpus": gpus * 3 // 4,
            "tensor_parallel": row.tensor_parallel,
            "prompt_tokens": PROMPT,
            "trainer_parallel": row.trainer_parallel,
            "lengths": {"mean": constants.code_mean if row.code else constants.mean},
            "costs": {
                "train_flops_share": constants.train_flops_share,
                "train_half_width": constants.train_half_width,
                "decode_overhead": constants.decode_overhead,
                "switch_seconds": constants.switch_seconds,
            },
        },
    }
    for name, value in (changes or {}).items():
        section, key = name.split(".")
        values[section][key] = value
    return Settings.model_validate({"run_dir": "unused", "steps": row.steps, **values})


def thinnest(settings: Settings) -> int:
    """The thinnest slice, up to an eighth, with whole engines, ranks and minibatches."""
    layout, groups = layout_of(settings), settings.control.batch_size
    return next(
        scale
        for scale in (8, 4, 2, 1)
        if groups % (scale * settings.trainer.minibatches) == layout.engines % scale == layout.ranks % scale == 0
    )


SYNCHRONOUS = {"launch.placement": "colocated", "control.max_staleness": 0, "simulate.rollout_gpus": None}
"""All devices generate, then all train."""


def on_slice(settings: Settings, scale: int, warmup: int, counted: int) -> SimulationResult:
    """Simulate 1/`scale` of it; throughput and step times are those of the whole. The caches are as large as they are
    on the whole cluster, over which more of the optimiser's state is spread."""
    simulated = settings.simulate
    assert simulated.gpus is not None
    changes = {
        "gpus": simulated.gpus // scale,
        "rollout_gpus": None if simulated.rollout_gpus is None else simulated.rollout_gpus // scale,
        "kv_cache_tokens": EngineCosts.of(settings).kv_capacity_tokens,
        "steps": warmup + counted,
    }
    part = settings.model_copy(
        update={
            "control": settings.control.model_copy(update={"batch_size": settings.control.batch_size // scale}),
            "simulate": simulated.model_copy(update=changes),
        }
    )
    result = simulate(part, warmup=warmup)
    return replace(
        result,
        trained_tokens_per_second=result.trained_tokens_per_second * scale,
        generated_tokens_per_second=result.generated_tokens_per_second * scale,
        hours=settings.steps * result.step_seconds / 3600,
    )
