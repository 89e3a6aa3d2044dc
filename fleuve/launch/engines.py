"""Starting an embedded engine's process from the rollout settings: a run's workers, and an evaluation's engine."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fleuve.config.settings import RolloutSettings
from fleuve.launch.process import ChildProcess


async def start_engine(
    name: str,
    model: str,
    rollout: RolloutSettings,
    log_path: Path,
    *,
    threads: int,
    cpus: Collection[int] | None = None,
    weights: Path | None = None,
) -> ChildProcess:
    """An engine that serves `model`, once it answers. `weights` is the directory that it may read new ones from.

    Raises:
        ChildError: it died, or did not answer within `rollout.start_timeout`.
    """
    options = {
        "model": model,
        "dtype": rollout.dtype,
        "device": rollout.device,
        "threads": threads,
        "max_running": rollout.max_running,
        "kv_cache_tokens": rollout.kv_cache_tokens,
        "prefill_tokens": rollout.prefill_tokens,
        "name": name,
        "weights": None if weights is None else str(weights),
    }
    return await ChildProcess.start(
        name,
        "fleuve.engine",
        options,
        log_path,
        cpus=cpus,
        threads=threads,
        start_timeout=rollout.start_timeout,
    )
