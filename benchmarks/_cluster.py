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
from fleuve.simulate.result import SimulationResult
from fleuve.simulate.run import simulate

NODE, GROUPS, SAMPLES, MINIBATCHES, LONGEST, PROMPT = 8, 512, 16, 4, 27_648, 256
UNBOUNDED = 32
"""η without a bound: more batches than the pipeline of any run here holds. (A real bound of ∞ admits the whole run's
prompts at its start, and they wait at the engines.)"""


@dataclass(frozen=True)
class Published:
    """One row of the paper's table. `tensor` is not in it: the fewest devices that hold the weights with room for a
    batch's caches."""

    name: str
    model: str
    nodes: int
    steps: int
    eta: int
    tensor: int
    sync_hours: float
    async_hours: float

    @property
    def speedup(self) -> float:
        return self.sync_hours / self.async_hours


PUBLISHED = (
    Published("1.5B maths", "qwen-1.5b", 16, 250, 8, 1, 41.0, 14.8),
    Published("7B maths", "qwen-7b", 24, 250, 8, 1, 57.7, 25.4),
    Published("14B code", "qwen-14b", 32, 80, 4, 2, 48.8, 21.9),
    Published("32B code", "qwen-32b", 48, 60, 4, 4, 51.1, 31.1),
)
ETAS = {0: 128.7, 1: 269.3, 2: 356.6, 4: 356.6, 8: 371.7, 16: 382.4, UNBOUNDED: 396.8}
"""Thousand trained tokens a second of the 1.5B model, by η."""
INTERRUPTION = {"qwen-1.5b": 0.12, "qwen-7b": 0.17}
"""What interruption adds to generated tokens a second on 4 nodes."""


@dataclass(frozen=True)
class Constants:
    """What is fitted; all else is `[simulate]`'s default. `mean` is derived, see `paper.MEAN`."""

    mean: float
    train_flops_share: float
    decode_overhead: float


def cluster(
    row: Published, constants: Constants, *, gpus: int | None = None, changes: Mapping[str, object] | None = None
) -> Settings:
    """The asynchronous run of `row`, on another number of devices if given; `changes` by dotted names."""
    gpus = gpus or row.nodes * NODE
    values: dict[str, dict[str, object]] = {
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "rollout": {"group_size": SAMPLES, "max_new_tokens": LONGEST, "dtype": "bfloat16"},
        "control": {
            "batch_size": GROUPS,
            "max_staleness": row.eta,
            "overdue": "train",  # the paper's
            "group_timeout": 1e6,
        },
        "trainer": {
            "minibatches": MINIBATCHES,
            "dtype": "bfloat16",
            "token_budget": 32_768,
            "activation_checkpointing": True,
        },
        "launch": {},
        "simulate": {
            "model": row.model,
            "hardware": "h800",
            "gpus": gpus,
            "rollout_gpus": gpus * 3 // 4 // row.tensor * row.tensor,
            "tensor_parallel": row.tensor,
            "prompt_tokens": PROMPT,
            "lengths": {"mean": constants.mean},
            "costs": {
                "train_flops_share": constants.train_flops_share,
                "decode_overhead": constants.decode_overhead,
            },
        },
    }
    for name, value in (changes or {}).items():
        section, key = name.split(".")
        values[section][key] = value
    return Settings.model_validate({"run_dir": "unused", "steps": row.steps, **values})


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
