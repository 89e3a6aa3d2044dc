"""What can be known to go wrong with vLLM before a server is started, and what is worth a second thought."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fleuve.config.settings import Settings


def vllm_problems(settings: Settings) -> Iterator[str]:
    """A line each."""
    rollout = settings.rollout
    if rollout.engine != "vllm":
        return
    python = rollout.vllm.python
    if not rollout.urls and settings.launch.backend == "local" and not Path(python).is_file():
        yield f"rollout.vllm.python = {python}: no such file; `make vllm` sets its environment up"
    context = rollout.vllm.context
    if context is not None and rollout.max_new_tokens >= context:
        yield (
            f"rollout.vllm.context = {context} leaves no room for a prompt: rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}"
        )


def vllm_notes(settings: Settings) -> Iterator[str]:
    """A line each."""
    if settings.rollout.engine == "vllm" and settings.control.max_staleness == 0 and settings.rollout.workers == 1:
        yield (
            "vLLM's answers depend in their last bits on what else is in the batch: two runs of the same seed are "
            "alike, and not the same bit for bit"
        )
