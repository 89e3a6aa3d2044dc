"""Every trained group, a JSON object a line: what was asked, answered, by which versions, and what it was worth."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleuve.types import Batch, Group, Trajectory


def write_rollouts(path: Path, batch: Batch) -> None:
    """One step's groups. `version` is the version the step started from: staleness is counted against it.

    Raises:
        OSError: the disk is full. Nothing half-written is left.
    """
    lines = [msgspec.json.encode(group_record(group, batch.version)) for group in batch.groups]
    try:
        path.write_bytes(b"\n".join(lines) + b"\n")
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def group_record(group: Group, version: int) -> dict[str, Any]:
    """One group as plain values. `output_ids`, `versions`, `logprobs`, `loss_mask` of an answer are `[tokens]`."""
    return {
        "group": group.id,
        "prompt_id": group.prompt.id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "version": version,
        "admitted_version": group.admitted_version,
        "prompt_ids": list(group.prompt.input_ids),
        "trajectories": [_answer_record(trajectory) for trajectory in group.trajectories],
    }


def _answer_record(answer: Trajectory) -> dict[str, Any]:
    return {
        "text": answer.text,
        "reward": answer.reward,
        "advantage": answer.advantage,
        "finish_reason": answer.finish_reason,
        "interruptions": answer.interruptions,
        "excluded": answer.excluded,
        "output_ids": answer.output_ids.tolist(),
        "versions": answer.versions.tolist(),
        "logprobs": np.round(answer.logprobs.astype(np.float64), 6).tolist(),
        "loss_mask": answer.loss_mask.astype(np.int8).tolist(),
    }
