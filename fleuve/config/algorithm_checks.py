"""What `fleuve check` says of `[algorithm]` and `[critic]`: what could never learn, what is given and not used, a line
that sums the choice up."""

from __future__ import annotations

from collections.abc import Iterator

from fleuve.config.settings import AlgorithmSettings, CriticSettings, Settings

IN_GROUP = ("group", "leave_one_out")
"""Baselines that judge an answer against the others of its group."""


def group_size_problem(settings: Settings) -> str | None:
    """Why groups of one answer could not be learnt from, if they could not."""
    algorithm = settings.algorithm
    if settings.rollout.group_size > 1:
        return None
    if algorithm.dynamic_sampling:
        return (
            "rollout.group_size = 1: algorithm.dynamic_sampling keeps groups whose answers score differently, and a "
            "group of one can never have signal; give it 2 or more"
        )
    if algorithm.baseline in IN_GROUP:
        return (
            f'rollout.group_size = 1: with algorithm.baseline = "{algorithm.baseline}" an answer\'s advantage is its '
            "reward against the others of its group, and there are none, so nothing would ever be learnt; "
            "give it 2 or more"
        )
    return None


def algorithm_summary(algorithm: AlgorithmSettings) -> str:
    """The choice in one line."""
    a = algorithm
    cap = {
        "none": "none",
        "second_moment": f"second_moment (budget {a.second_moment_budget:g})",
    }.get(a.cap, f"{a.cap} ({a.cap_level}, {a.cap_low:g} to {a.cap_value:g})")
    clip = f" (clip {a.clip_low:g}, {a.clip_high:g})" if a.objective in ("ppo", "gspo", "cispo") else ""
    extras = {
        f"KL {a.kl_coefficient:g} in the {a.kl_in}": a.kl_coefficient > 0,
        f"entropy {a.entropy_coefficient:g}": a.entropy_coefficient != 0,
        "dynamic sampling": a.dynamic_sampling,
        "truncated answers excluded": a.truncated == "exclude",
        f"overlong penalty {a.overlong_penalty:g} over the last {a.overlong_buffer:.0%}": a.overlong_buffer > 0,
    }
    return ", ".join(
        [
            f"algorithm {a.preset}: baseline {a.baseline}",
            f"normalise {a.normalise}",
            f"objective {a.objective}{clip}",
            f"aggregation {a.aggregation}",
            f"proximal {a.proximal}",
            f"cap {cap}",
            *(text for text, given in extras.items() if given),
        ]
    )


def algorithm_notes(settings: Settings) -> list[str]:
    """What is allowed and yet worth a second thought: a setting without any effect, groups thrown away for nothing."""
    algorithm = settings.algorithm
    usual = AlgorithmSettings(preset=algorithm.preset)
    lines = [
        f"{_given('algorithm', algorithm, name)} has no part: {why}"
        for name, why in _unused_algorithm(algorithm)
        if getattr(algorithm, name) != getattr(usual, name)
    ]
    lines += [
        f"{_given('critic', settings.critic, name)} has no part: {why}"
        for name, why in _unused_critic(settings)
        if getattr(settings.critic, name) != getattr(CriticSettings(), name)
    ]
    limit = settings.rollout.max_new_tokens
    if algorithm.overlong_buffer and (algorithm.overlong_penalty == 0 or round(algorithm.overlong_buffer * limit) == 0):
        why = "algorithm.overlong_penalty is 0"
        if algorithm.overlong_penalty:
            why = f"it is less than one token of rollout.max_new_tokens = {limit}"
        lines.append(f"algorithm.overlong_buffer = {algorithm.overlong_buffer:g} has no part: {why}")
    if algorithm.objective == "policy_gradient" and algorithm.proximal == "behaviour":
        lines.append(
            'algorithm.objective = "policy_gradient" with algorithm.proximal = "behaviour": it has no ratio, and every '
            "weight is 1, so nothing corrects for staleness"
        )
    if algorithm.dynamic_sampling and algorithm.baseline not in IN_GROUP:
        lines.append(
            f'algorithm.dynamic_sampling = true with algorithm.baseline = "{algorithm.baseline}": groups whose answers '
            "all score alike carry signal there, and are thrown away"
        )
    return lines


def _unused_algorithm(a: AlgorithmSettings) -> Iterator[tuple[str, str]]:
    """Settings that nothing reads as the others are, and why."""
    if a.kl_coefficient == 0:
        for name in ("reference", "kl_in", "kl_estimator"):
            yield name, "algorithm.kl_coefficient is 0"
    if a.objective in ("sapo", "policy_gradient"):
        for name in ("clip_low", "clip_high"):
            yield name, f'algorithm.objective = "{a.objective}" has no clip'
    if a.objective not in ("ppo", "gspo"):
        yield "dual_clip", f'algorithm.objective is "{a.objective}", not "ppo" or "gspo"'
    if a.objective != "sapo":
        for name in ("tau_positive", "tau_negative"):
            yield name, f'algorithm.objective is "{a.objective}", not "sapo"'
    if a.aggregation != "constant":
        yield "horizon", f'algorithm.aggregation is "{a.aggregation}", not "constant"'
    yield from _unused_cap(a)
    if a.cap != "second_moment":
        yield "second_moment_budget", f'algorithm.cap is "{a.cap}", not "second_moment"'
    if a.baseline in IN_GROUP:
        yield "gamma", f'algorithm.baseline = "{a.baseline}" judges answers as a whole'
    if a.baseline != "critic":
        yield "gae_lambda", f'algorithm.baseline is "{a.baseline}", not "critic"'
    if a.overlong_buffer == 0:
        yield "overlong_penalty", "algorithm.overlong_buffer is 0"


def _unused_cap(a: AlgorithmSettings) -> Iterator[tuple[str, str]]:
    """Of the correction. `cap` and `cap_value` also bound the weights of KL in the loss."""
    bounds_kl = a.kl_coefficient > 0 and a.kl_in == "loss"
    if a.proximal == "behaviour":
        for name in ("cap_level", "cap_low") if bounds_kl else ("cap", "cap_level", "cap_value", "cap_low"):
            yield name, 'with algorithm.proximal = "behaviour" every weight is 1'
    elif a.cap == "none":
        for name in ("cap_value", "cap_low"):
            yield name, 'algorithm.cap is "none"'
    elif a.cap == "second_moment":
        for name in ("cap_level", "cap_low") if bounds_kl else ("cap_level", "cap_value", "cap_low"):
            yield name, 'algorithm.cap is "second_moment"'


def _unused_critic(settings: Settings) -> Iterator[tuple[str, str]]:
    """The same for `[critic]`."""
    if settings.algorithm.baseline != "critic":
        for name in CriticSettings.model_fields:
            yield name, f'algorithm.baseline is "{settings.algorithm.baseline}", not "critic"'
    elif settings.critic.backbone == "shared":
        yield "path", 'critic.backbone = "shared" is the policy\'s own'
    else:
        yield "coefficient", 'critic.backbone is "own", not "shared"'


def _given(section: str, values: AlgorithmSettings | CriticSettings, name: str) -> str:
    value = getattr(values, name)
    return f"{section}.{name} = {value:g}" if isinstance(value, float) else f"{section}.{name} = {value}"
