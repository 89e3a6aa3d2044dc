"""What `fleuve check` says of a trainer of several ranks."""

from __future__ import annotations

import json
from math import gcd
from pathlib import Path

from fleuve.config.accelerator import no_gpu
from fleuve.config.settings import Settings


def attention_heads(model: Path | None) -> tuple[int, int] | None:
    """How many heads of queries, and how many of keys and values, the model in directory `model` has; None where that
    cannot be read: other checks tell what is wrong with it."""
    if model is None:
        return None
    try:
        config = json.loads((model / "config.json").read_text())
        heads = int(config["num_attention_heads"])
        return heads, int(config.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def heads_problem(settings: Settings, model: Path | None) -> str | None:
    """Why the ranks that compute micro-batches together cannot share the attention of the model in directory `model`,
    in one line."""
    context, tensor = settings.trainer.context_parallel, settings.trainer.tensor_parallel
    found = attention_heads(model)
    if found is None or context == tensor == 1:
        return None
    heads, pairs = found
    divisor = gcd(heads, pairs)
    if divisor % tensor:
        return (
            f"trainer.tensor_parallel = {tensor}: the model has {heads} attention heads and {pairs} key-value heads, "
            f"which that does not divide; give it a divisor of {divisor}"
        )
    if heads % (context * tensor) == 0:
        return None
    return (
        f"trainer.context_parallel = {context}: the model has {heads // tensor} attention heads"
        f"{'' if tensor == 1 else ' for each part of trainer.tensor_parallel'}, which that does not divide; "
        f"give it a divisor of {heads // tensor}"
    )


def rank_notes(settings: Settings, cores: int) -> list[str]:
    """What runs and yet is not what was meant, or slower than it need be, on this machine of `cores` cores."""
    trainer = settings.trainer
    notes = []
    if settings.launch.backend == "local" and trainer.device != "cuda" and no_gpu("") and trainer.ranks > cores:
        notes.append(
            f"trainer.ranks = {trainer.ranks}: this machine has {cores} cores for this process, so ranks take turns on "
            f"them and are slower than trainer.ranks = 1; they help where each has a core or a GPU of its own"
        )
    if trainer.offload and (trainer.device == "cpu" or no_gpu("")):
        notes.append("trainer.offload has no part: without a GPU everything is in host memory anyway; leave it out")
    groups = settings.control.batch_size // trainer.minibatches
    answers = groups * settings.rollout.group_size
    if trainer.ranks > 1 and answers < trainer.ranks // (trainer.context_parallel * trainer.tensor_parallel):
        notes.append(
            f"trainer.ranks = {trainer.ranks}: a minibatch has {answers} answers (control.batch_size / "
            "trainer.minibatches × rollout.group_size), so some ranks have nothing to compute; take fewer"
        )
    return notes
