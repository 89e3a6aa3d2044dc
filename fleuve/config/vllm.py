"""`[rollout.vllm]`: the servers of `rollout.engine = "vllm"` that a run starts, and how Fleuve speaks to any."""

from __future__ import annotations

from typing import Literal

from fleuve.config.section import Positive, Seconds, Section, Share


class VllmSettings(Section):
    """`python` is the interpreter of the environment that `make vllm` sets up. `context` None is the model's own, as
    far as `rollout.kv_cache_tokens` goes. On GPUs the KV cache has what `gpu_memory_utilization` leaves for it; on CPUs
    `rollout.kv_cache_tokens`. `eager` "auto" compiles on GPUs alone. `arguments` go to the server behind all others.

    `versions`: where a token's version comes from, the server's own `spans`, or `pieces`: an update cuts the answers in
    flight, and each piece is of one version. `stream_interval` tokens of an answer come at a time."""

    python: str = ".venv-vllm/bin/python"
    context: Positive | None = None
    gpu_memory_utilization: Share = 0.9
    tensor_parallel: Positive = 1
    eager: Literal["auto", "on", "off"] = "auto"
    versions: Literal["auto", "spans", "pieces"] = "auto"
    stream_interval: Positive = 8
    start_timeout: Seconds = 900.0
    arguments: tuple[str, ...] = ()
