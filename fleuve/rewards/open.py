"""Who scores: verifier processes on this machine, or a reward service on another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleuve.config.settings import RewardSettings
from fleuve.rewards.client import RemoteRewarder
from fleuve.rewards.pool import RewardPool


def open_rewarder(
    settings: RewardSettings, verifiers: Sequence[str], log_path: Path | None = None
) -> RewardPool | RemoteRewarder:
    """An asynchronous context manager; `settings.url` chooses."""
    if settings.url is not None:
        return RemoteRewarder(settings, verifiers)
    return RewardPool(settings, verifiers, log_path)
