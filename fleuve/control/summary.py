"""What a batch says about how it was generated, as metrics."""

from __future__ import annotations

import numpy as np

from fleuve.types import Batch, Trajectory


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """`rollout/interrupted` counts answers with tokens of two or more versions, `rollout/excluded` those without a
    verdict."""
    answers = [t for g in batch.groups for t in g.trajectories]
    return {
        "rollout/interrupted": float(sum(_several_versions(t) for t in answers)),
        "rollout/excluded": float(sum(t.reward is None for t in answers)),
        "rollout/group_seconds_mean": float(np.mean([g.finished_at - g.admitted_at for g in batch.groups])),
    }


def _several_versions(trajectory: Trajectory) -> bool:
    versions = trajectory.versions
    return len(versions) > 0 and bool(versions.min() != versions.max())
