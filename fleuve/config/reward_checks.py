"""Can answers be scored? Looks for the verifiers, the walls around programs, and the service on another machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from fleuve.config.problems import Problems
from fleuve.config.settings import RewardSettings
from fleuve.errors import UserError
from fleuve.rewards.code.options import deadline_for
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
    for verifier, place in verifiers.items():
        problems.catch(partial(check_verifier, verifier, reward.path, place))
    sandbox = problems.catch(partial(sandbox_line, reward, verifiers))
    if sandbox:
        problems.catch(partial(_check_time, reward, *slowest))
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


def _check_time(reward: RewardSettings, seconds: float, where: str) -> None:
    if seconds and (needed := deadline_for(seconds)) > reward.deadline:
        raise UserError(
            f"{where}: time_limit = {seconds:g} s needs reward.deadline = {needed:g} or more, not {reward.deadline:g}"
        )
