"""`fleuve rewards serve`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from fleuve.config.loader import settings_from
from fleuve.config.reward_checks import check_path, check_times
from fleuve.config.settings import RewardSettings, Section
from fleuve.errors import UserError
from fleuve.rewards.find import check_verifier
from fleuve.rewards.process import CrashError
from fleuve.rewards.server import run
from fleuve.wire.listen import bind

OFFERED = ("math", "exact")
"""Verifiers of every service."""


class ServeSettings(Section):
    """What a service can be told by dotted flags."""

    reward: RewardSettings = RewardSettings()


def serve_command(host: str, port: int, verifiers: Sequence[str], log: Path | None, flags: Sequence[str]) -> None:
    """Serve until interrupted.

    Raises:
        UserError: a flag, a setting, a verifier or the address cannot be used.
    """
    settings = settings_from(ServeSettings, {}, flags, "fleuve rewards serve").reward
    if settings.url is not None:
        raise UserError("fleuve rewards serve: --reward.url is for the runs that ask the service")
    names = tuple(dict.fromkeys([*OFFERED, *verifiers]))
    check_path(settings)
    check_times(settings, names)
    for name in names:
        check_verifier(name, settings.path)
    with bind(host, port) as sock:
        try:
            asyncio.run(run(settings, names, sock, log))
        except CrashError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
