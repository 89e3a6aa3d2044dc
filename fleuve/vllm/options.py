"""What a vLLM server is started with, and the command line and environment that it comes to. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from fleuve.config.accelerator import no_gpu
from fleuve.launch.child import CPUS_VARIABLE, LIFELINE_VARIABLE, SOCKET_VARIABLE
from fleuve.vllm import INSIDE

BLOCK = 128
"""Tokens of a block of vLLM's KV cache on CPUs; a size that is no multiple of it is rounded down."""


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model`: a Hugging Face directory or hub name. `python`: of vLLM's environment. `name`: what logs call it.
    `weights`: the directory that it may read new weights from (None: any). The rest are the settings of `rollout` and
    `rollout.vllm`."""

    model: str
    python: str
    name: str = "vllm"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    max_running: int = 128
    kv_cache_tokens: int = 65536
    prefill_tokens: int = 4096
    context: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel: int = 1
    eager: Literal["auto", "on", "off"] = "auto"
    stream_interval: int = 8
    weights: str | None = None
    arguments: tuple[str, ...] = ()


def command(options: VllmOptions, host: str, port: int) -> list[str]:
    """The command line of a server; its device is known. `host` and `port` are for one that is given no socket."""
    config = _config(options.model)
    context = context_of(options, config)
    line = [
        options.python,
        *("-m", "fleuve_vllm.serve"),
        *("--model", options.model),
        *("--served-model-name", options.name),
        *("--host", host),
        *("--port", str(port)),
        *("--dtype", options.dtype),
        *("--max-model-len", str(context)),
        *("--max-num-seqs", str(options.max_running)),
        *("--logprobs-mode", "processed_logprobs"),
        *("--stream-interval", str(options.stream_interval)),
        *("--tensor-parallel-size", str(options.tensor_parallel)),
        *("--worker-extension-cls", "fleuve_vllm.worker.FleuveWorker"),
        *("--weight-transfer-config", '{"backend": "fleuve"}'),
        *("--middleware", "fleuve_vllm.guard.Guard"),
        *("--uvicorn-log-level", "warning"),
        "--enable-prefix-caching",
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
    ]
    if options.eager == "on" or (options.eager == "auto" and options.device == "cpu"):
        line.append("--enforce-eager")
    if options.device == "cpu":
        # Where a prompt is computed in parts, vLLM takes back what it has drawn for the parts from the request's own
        # random generator; those of CPUs cannot, and the engine dies (0.32). So every prompt is one part.
        line += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(options.prefill_tokens, context))]
        tokens = max(options.kv_cache_tokens, context + BLOCK) + BLOCK  # one block is vLLM's own
        line += ["--kv-cache-memory-bytes", str(-(-tokens // BLOCK) * BLOCK * kv_bytes(config, options.dtype))]
    else:
        line += ["--max-num-batched-tokens", str(max(options.prefill_tokens, options.max_running))]
        line += ["--gpu-memory-utilization", f"{options.gpu_memory_utilization:g}"]
    return [*line, *options.arguments]


def environment(options: VllmOptions, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server, made from this process's: nothing of Fleuve's own Python is left in its path."""
    own = {key: value for key, value in inherited.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    own |= {
        "PYTHONPATH": str(INSIDE),
        "VLLM_SERVER_DEV_MODE": "1",  # pausing, and changing weights
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if options.weights is not None:
        own["FLEUVE_VLLM_WEIGHTS"] = options.weights
    if Path(options.model).is_dir():
        own |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if options.device == "cpu" and "VLLM_CPU_OMP_THREADS_BIND" not in own:
        own["VLLM_CPU_OMP_THREADS_BIND"] = binding(inherited.get(CPUS_VARIABLE, ""), options)
    return own


def binding(cpus: str, options: VllmOptions) -> str:
    """Where the computing threads go, as vLLM wants to be told: to `cpus`, those that the server is bound to (`0,2`;
    empty: it floats). vLLM's loops do not sleep between two steps; threads that shared a core with such a loop of
    another server would be slow."""
    if options.tensor_parallel > 1:
        return "auto"  # it shares out what there is
    return ",".join(cpus.split(",")[: options.threads]) if cpus else "nobind"


def context_of(options: VllmOptions, config: Mapping[str, Any] | None = None) -> int:
    """The longest sequence that the server takes, in tokens."""
    if options.context is not None:
        return options.context
    found = (_config(options.model) if config is None else config).get("max_position_embeddings")
    own = found if isinstance(found, int) and found > 0 else 32768
    return min(own, options.kv_cache_tokens) if options.device == "cpu" else own


def kv_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of one token in the KV cache: keys and values of every layer.

    Example: 4 layers, 2 key-value heads of 64, float32: 2 · 4 · 2 · 64 · 4 = 4096.
    """
    heads = int(config.get("num_attention_heads") or 32)
    width = int(config.get("head_dim") or int(config.get("hidden_size") or 4096) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    layers = int(config.get("num_hidden_layers") or 32)
    return 2 * layers * kv_heads * width * (4 if dtype == "float32" else 2)


def _config(model: str) -> dict[str, Any]:
    """The model's `config.json`; empty for a hub name."""
    try:
        config: dict[str, Any] = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config


def become(options: VllmOptions, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Turn this process into the server: same process, same open files, other program. Never returns."""
    if options.device == "auto":
        options = msgspec.structs.replace(options, device="cpu" if no_gpu("device") else "cuda")
    for fd in (LIFELINE_VARIABLE, SOCKET_VARIABLE):
        if fd in os.environ:
            os.set_inheritable(int(os.environ[fd]), True)
    line = command(options, host, port)
    os.execve(line[0], line, environment(options, os.environ))
