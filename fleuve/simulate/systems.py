"""The systems that are compared: each is a few settings on top of a run's own, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from fleuve.config.settings import Settings

ETA = 4
"""The bound on staleness of the asynchronous systems, for a run that asks for less than `LEAST_ETA` itself."""

LEAST_ETA = 2


def systems(settings: Settings) -> dict[str, Settings]:
    """Name → settings: synchronous ones first, then more and more asynchronous, then what may be done differently."""
    own = settings.control.max_staleness
    eta = own if own >= LEAST_ETA else ETA
    asynchronous = {"control.max_staleness": eta, "rollout.interrupt": "recompute", "control.overdue": "wait"}
    table: dict[str, Mapping[str, object]] = {
        "synchronous, colocated": {"launch.placement": "colocated", "control.max_staleness": 0},
        "synchronous, disaggregated": {"control.max_staleness": 0},
        "one step of overlap": {"control.max_staleness": 1, "rollout.interrupt": "finish"},
        f"asynchronous, η = {eta}": asynchronous,
        f"η = {eta}, keeping caches": {**asynchronous, "rollout.interrupt": "keep"},
        f"η = {eta}, no interruption": {**asynchronous, "rollout.interrupt": "finish"},
        f"η = {eta}, overdue masked": {**asynchronous, "control.overdue": "mask"},
        f"η = {eta}, overdue trained": {**asynchronous, "control.overdue": "train"},
        f"η = {eta}, overdue dropped": {**asynchronous, "control.overdue": "drop"},
    }
    return {name: changed(settings, changes) for name, changes in table.items()}


def changed(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """`settings` with some of them, by dotted names, set to other values; the layout is disaggregated unless said.

    Raises:
        pydantic.ValidationError: the values are not allowed.
    """
    plain = settings.model_dump()
    plain["launch"]["placement"] = "disaggregated"
    if changes.get("launch.placement") == "colocated":
        plain["simulate"]["rollout_gpus"] = None  # all of them generate, and all of them train
    for name, value in changes.items():
        *sections, key = name.split(".")
        table = plain
        for section in sections:
            table = table[section]
        table[key] = value
    return Settings.model_validate(plain)
