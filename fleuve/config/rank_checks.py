"""What `fleuve check` says of a trainer of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

from fleuve.config.accelerator import no_gpu
from fleuve.config.settings import Settings


def heads_problem(settings: Settings, model: Path | None) -> str | None:
    """Why the ranks of a context cannot share the attention of the model in directory `model`, in one line."""
    count = settings.trainer.context_parallel
    if model is None or count == 1:
        return None
    try:
        heads = int(json.loads((model / "config.json").read_text())["num_attention_heads"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # other checks tell what is wrong with it
    if heads % count == 0:
        return None
    return (
        f"trainer.context_parallel = {count}: the model has {heads} attention heads, which that does not divide; "
        f"give it a divisor of {heads}"
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
    if trainer.ranks > 1 and groups * settings.rollout.group_size < trainer.ranks:
        answers = groups * settings.rollout.group_size
        notes.append(
            f"trainer.ranks = {trainer.ranks}: a minibatch has {answers} answers (control.batch_size / "
            "trainer.minibatches × rollout.group_size), so some ranks have nothing to compute; take fewer"
        )
    return notes
