"""Settings of runs on imagined clusters, for the tests of costs and plans."""

from __future__ import annotations

from typing import Any

from fleuve.config.settings import Settings

IDEAL = {
    "bandwidth_share": 1.0,
    "prefill_flops_share": 1.0,
    "decode_flops_share": 1.0,
    "train_flops_share": 1.0,
    "network_share": 1.0,
    "memory_share": 1.0,
    "decode_overhead": 0.0,
    "sequence_overhead": 0.0,
    "allreduce_latency": 0.0,
    "micro_batch_overhead": 0.0,
    "step_overhead": 0.0,
    "publish_overhead": 0.0,
    "update_overhead": 0.0,
}
"""Kernels that reach what the data sheet says."""


def cluster(model: str = "qwen-7b", hardware: str = "h100", **changes: dict[str, Any]) -> Settings:
    """A bf16 run on 16 GPUs, half of them for rollout; `changes` are merged into its tables."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": model},
        "data": {"train": "procedural:chain"},
        "rollout": {"engine": "vllm", "dtype": "bfloat16", "max_new_tokens": 8192, "group_size": 4},
        "control": {"batch_size": 16},
        "trainer": {"dtype": "bfloat16", "minibatches": 2, "token_budget": 16384, "activation_checkpointing": True},
        "simulate": {"hardware": hardware, "gpus": 16, "rollout_gpus": 8, "costs": IDEAL},
    }
    for name, change in changes.items():
        tables[name] = {**tables.get(name, {}), **change}
    return Settings.model_validate({"run_dir": "runs/imagined", **tables})
