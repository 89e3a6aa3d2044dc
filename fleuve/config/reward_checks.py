"""Can answers be scored? Looks for the verifiers, the walls around programs, and the service on another machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from fleuve.config.problems import Problems
from fleuve.config.settings import RewardSettings
from fleuve.errors import UserError
from fleuve.rewards.code.options import CodeOptions, deadline_for
from fleuve.rewards.find import check_verifier
from fleuve.rewards.probe import probe
from fleuve.rewards.sandbox.level import choose, describe
from fleuve.rewards.weighted import names


def check_rewards(reward: RewardSettings, verifiers: Mapping[str, str], slowest: tuple[float, str]) -> list[str]:
    """`verifiers`: each weighted sum, with what names it (a setting, or `file:line` and the field). `slowest`: the
    longest `time_limit` of a row in seconds, and where. Returns what will score, a line each: `ok: ...`, and
    `note: ...` for what may not be so.

    Of a service elsewhere neither the modules nor the walls can be seen from here: it looks for them as it starts.

    Raises:
        UserError: one line a problem.
    """
    problems = Problems()
    if reward.url is not None:
        line = problems.catch(partial(_service, reward, list(verifiers)))
        problems.raise_if_any()
        return [line]
    problems.catch(partial(check_path, reward))
    if not problems.lines:  # else they would be looked for where there is nothing
        for verifier, place in verifiers.items():
            problems.catch(partial(check_verifier, verifier, reward.path, place))
    problems.catch(partial(check_times, reward, verifiers))
    sandbox = problems.catch(partial(sandbox_line, reward, verifiers))
    if sandbox:
        problems.catch(partial(_check_time_limit, reward, *slowest))
    problems.raise_if_any()
    return [f"ok: {sandbox}"] if sandbox else []


def sandbox_line(reward: RewardSettings, verifiers: Iterable[str]) -> str:
    """Which walls programs will run behind, where one of the verifiers is `code`; else "".

    Raises:
        UserError: those that the settings ask for cannot be had here, or are the weakest and not allowed.
    """
    if not any(_uses_code(verifier) for verifier in verifiers):
        return ""
    return describe(choose(reward.code.sandbox, reward.code.allow_weak_sandbox))


def check_path(reward: RewardSettings) -> None:
    """Whether there is what verifiers are to be imported from.

    Raises:
        UserError: `reward.path` is no directory.
    """
    if reward.path is not None and not Path(reward.path).is_dir():
        raise UserError(f"reward.path = {reward.path}: no such directory")


def check_times(reward: RewardSettings, verifiers: Iterable[str]) -> None:
    """Whether the deadline leaves a program the time that the settings give it, where one of the verifiers is `code`.

    Raises:
        UserError: it does not; one line a setting.
    """
    if not any(_uses_code(verifier) for verifier in verifiers):
        return
    budget, lines = _budget(reward), []
    for key, value in (("seconds", reward.code.seconds), ("cpu_seconds", reward.code.cpu_seconds)):
        if value > budget:
            lines.append(
                f"reward.code.{key} = {value:g} needs reward.deadline = {deadline_for(value):g} or more, not "
                f"{reward.deadline:g}; with that, it may be {math.floor(100 * budget) / 100:g} at most"
            )
    if lines:
        raise UserError("\n".join(lines))


def _budget(reward: RewardSettings) -> float:
    """Seconds; 2.55 is 2.55, whatever its last bits are."""
    return CodeOptions(deadline=reward.deadline).budget + 1e-9


def _uses_code(verifier: str) -> bool:
    try:
        return "code" in names([verifier])
    except UserError:  # it is none, which `check_verifier` says
        return False


def _service(reward: RewardSettings, verifiers: list[str]) -> str:
    assert reward.url is not None
    there, why = probe(reward.url, verifiers)
    if there is None:
        return (
            f"note: reward.url = {reward.url}: no reward service answers there now ({why}); "
            f"a run waits for it for reward.start_timeout = {reward.start_timeout:g} s"
        )
    return f"ok: answers are scored by the {there.workers} processes of the reward service at {reward.url}"


def _check_time_limit(reward: RewardSettings, seconds: float, where: str) -> None:
    if seconds > _budget(reward):
        needed = deadline_for(seconds)
        raise UserError(
            f"{where}: time_limit = {seconds:g} s needs reward.deadline = {needed:g} or more, not {reward.deadline:g}"
        )
