"""What can be known to go wrong with vLLM before a server is started, and what is worth a second thought."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fleuve.config.rank_checks import attention_heads
from fleuve.config.settings import Settings
from fleuve.config.vllm_environment import environment_problem


def vllm_problems(settings: Settings) -> Iterator[str]:
    """A line each."""
    rollout = settings.rollout
    if rollout.engine != "vllm":
        return
    # In a cluster, the environment is on other nodes.
    own = not rollout.urls and settings.launch.backend == "local"
    if own and (problem := environment_problem(rollout.vllm.python)):
        yield problem
    context = rollout.vllm.context
    if context is not None and rollout.max_new_tokens >= context:
        yield (
            f"rollout.vllm.context = {context} leaves no room for a prompt: rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}"
        )


def vllm_heads_problem(settings: Settings, model: Path | None) -> str | None:
    """Why `rollout.vllm.tensor_parallel` processes cannot share the attention of the model in directory `model`, in one
    line. Fewer key-value heads than processes are copied, as often to each."""
    rollout, tensor = settings.rollout, settings.rollout.vllm.tensor_parallel
    heads = attention_heads(model)
    if heads is None or rollout.engine != "vllm" or rollout.urls or tensor == 1:
        return None
    queries, pairs = heads
    shares = [n for n in range(1, queries + 1) if not queries % n and (not pairs % n or not n % pairs)]
    if tensor in shares:
        return None
    return (
        f"rollout.vllm.tensor_parallel = {tensor}: the model has {queries} attention heads and {pairs} key-value "
        f"heads, which so many processes cannot share; it can be {', '.join(map(str, shares))}"
    )


def vllm_notes(settings: Settings) -> Iterator[str]:
    """A line each."""
    if settings.rollout.engine == "vllm" and settings.control.max_staleness == 0 and settings.rollout.workers == 1:
        yield (
            "vLLM's answers depend in their last bits on what else is in the batch: two runs of the same seed are "
            "alike, and not the same bit for bit"
        )
