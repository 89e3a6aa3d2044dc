"""What `fleuve check` says of the algorithm, before anything starts."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from checked import Make, notes, problems

from fleuve.config.preflight import preflight
from fleuve.config.presets import Preset
from fleuve.config.settings import CriticSettings

CRITIC = {"preset": "ppo"}


@pytest.mark.parametrize("preset", ["grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_of_one_is_an_error_where_answers_are_judged_against_each_other(make: Make, preset: str) -> None:
    (line,) = problems(make(rollout={"group_size": 1}, algorithm={"preset": preset}))
    assert line.startswith("rollout.group_size = 1: with algorithm.baseline = ")
    assert line.endswith("give it 2 or more")
    preflight(make(rollout={"group_size": 2}, algorithm={"preset": preset}))


@pytest.mark.parametrize("preset", ["ppo", "reinforce_pp"])
def test_a_group_of_one_can_be_learnt_from_without_a_comparison(make: Make, preset: str) -> None:
    assert notes(make(rollout={"group_size": 1}, algorithm={"preset": preset})) == []


@pytest.mark.parametrize("preset", ["grpo", "rloo", "ppo", "reinforce_pp"])
def test_a_group_of_one_never_has_the_signal_that_dynamic_sampling_waits_for(make: Make, preset: str) -> None:
    algorithm = {"preset": preset, "dynamic_sampling": True}
    (line,) = problems(make(rollout={"group_size": 1}, algorithm=algorithm))
    assert "can never have signal" in line
    assert line.endswith("give it 2 or more")


@pytest.mark.parametrize("preset", ["ppo", "reinforce_pp"])
def test_dynamic_sampling_is_noted_where_ties_carry_signal(make: Make, preset: str) -> None:
    (line,) = notes(make(algorithm={"preset": preset, "dynamic_sampling": True}))
    assert "all score alike carry signal there, and are thrown away" in line


@pytest.mark.parametrize("preset", get_args(Preset))
def test_no_preset_gives_a_note(make: Make, preset: str) -> None:
    assert notes(make(algorithm={"preset": preset})) == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"algorithm": {"reference": "models/start"}},
            "algorithm.reference = models/start has no part: algorithm.kl_coefficient is 0",
        ),
        ({"algorithm": {"kl_in": "reward"}}, "algorithm.kl_in = reward has no part: algorithm.kl_coefficient is 0"),
        (
            {"critic": {"path": "models/start"}},
            'critic.path = models/start has no part: algorithm.baseline is "group", not "critic"',
        ),
        (
            {"critic": {"learning_rate": 1e-4}},
            'critic.learning_rate = 0.0001 has no part: algorithm.baseline is "group", not "critic"',
        ),
        (
            {"algorithm": CRITIC, "critic": {"backbone": "shared", "path": "models/start"}},
            'critic.path = models/start has no part: critic.backbone = "shared" is the policy\'s own',
        ),
        (
            {"algorithm": CRITIC, "critic": {"coefficient": 0.5}},
            'critic.coefficient = 0.5 has no part: critic.backbone is "own", not "shared"',
        ),
        (
            {"algorithm": {"tau_positive": 2.0}},
            'algorithm.tau_positive = 2 has no part: algorithm.objective is "ppo", not "sapo"',
        ),
        (
            {"algorithm": {"preset": "sapo", "clip_high": 0.4}},
            'algorithm.clip_high = 0.4 has no part: algorithm.objective = "sapo" has no clip',
        ),
        (
            {"algorithm": {"preset": "cispo", "dual_clip": 3.0}},
            'algorithm.dual_clip = 3 has no part: algorithm.objective is "cispo", not "ppo" or "gspo"',
        ),
        (
            {"algorithm": {"horizon": 100}},
            'algorithm.horizon = 100 has no part: algorithm.aggregation is "token_mean", not "constant"',
        ),
        (
            {"algorithm": {"proximal": "behaviour", "cap_value": 2.0}},
            'algorithm.cap_value = 2 has no part: with algorithm.proximal = "behaviour" every weight is 1',
        ),
        (
            {"algorithm": {"cap": "none", "cap_low": 0.5}},
            'algorithm.cap_low = 0.5 has no part: algorithm.cap is "none"',
        ),
        (
            {"algorithm": {"preset": "m2po", "cap_value": 2.0}},
            'algorithm.cap_value = 2 has no part: algorithm.cap is "second_moment"',
        ),
        (
            {"algorithm": {"second_moment_budget": 0.1}},
            'algorithm.second_moment_budget = 0.1 has no part: algorithm.cap is "mask", not "second_moment"',
        ),
        (
            {"algorithm": {"gamma": 0.9}},
            'algorithm.gamma = 0.9 has no part: algorithm.baseline = "group" judges answers as a whole',
        ),
        (
            {"algorithm": {"preset": "reinforce_pp", "gae_lambda": 0.9}},
            'algorithm.gae_lambda = 0.9 has no part: algorithm.baseline is "none", not "critic"',
        ),
        (
            {"algorithm": {"overlong_penalty": 0.5}},
            "algorithm.overlong_penalty = 0.5 has no part: algorithm.overlong_buffer is 0",
        ),
    ],
)
def test_a_setting_without_effect_is_noted(make: Make, sections: dict[str, Any], expected: str) -> None:
    assert notes(make(**sections)) == [expected]


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"kl_coefficient": 0.01, "kl_in": "reward", "kl_estimator": "k1"}},
        {"algorithm": {**CRITIC, "gamma": 0.99, "gae_lambda": 0.95}, "critic": {"learning_rate": 1e-4, "clip": 0.0}},
        {"algorithm": CRITIC, "critic": {"backbone": "shared", "coefficient": 0.5}},
        {"algorithm": {"preset": "sapo", "tau_positive": 2.0}},
        {"algorithm": {"preset": "gspo", "dual_clip": 3.0, "cap_level": "sequence"}},
        {"algorithm": {"preset": "dr_grpo", "horizon": 100}},
        {"algorithm": {"preset": "m2po", "second_moment_budget": 0.1, "kl_coefficient": 0.01, "cap_value": 2.0}},
        {"algorithm": {"proximal": "behaviour", "kl_coefficient": 0.01, "cap_value": 2.0}},
        {"algorithm": {"preset": "reinforce_pp", "gamma": 0.99}},
        {"algorithm": {"preset": "dapo", "overlong_penalty": 0.5}},
        {"critic": CriticSettings().model_dump()},
    ],
)
def test_one_that_has_an_effect_or_its_usual_value_is_not(make: Make, sections: dict[str, Any]) -> None:
    assert notes(make(**sections)) == []


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (
            {},
            "ok: algorithm grpo: baseline group, normalise group, objective ppo (clip 0.2, 0.28), "
            "aggregation token_mean, proximal recompute, cap mask (token, 0 to 5)",
        ),
        (
            {"preset": "gspo", "proximal": "interpolate", "cap": "clamp", "cap_level": "sequence", "cap_low": 0.5},
            "ok: algorithm gspo: baseline group, normalise group, objective gspo (clip 0.0003, 0.0004), "
            "aggregation answer_mean, proximal interpolate, cap clamp (sequence, 0.5 to 5)",
        ),
        (
            {"preset": "m2po"},
            "ok: algorithm m2po: baseline group, normalise group, objective ppo (clip 0.2, 0.28), "
            "aggregation token_mean, proximal recompute, cap second_moment (budget 0.04)",
        ),
        (
            {"preset": "rloo", "cap": "none", "kl_coefficient": 0.01, "entropy_coefficient": 0.001},
            "ok: algorithm rloo: baseline leave_one_out, normalise none, objective policy_gradient, "
            "aggregation constant, proximal recompute, cap none, KL 0.01 in the loss, entropy 0.001",
        ),
        (
            {"preset": "dapo", "truncated": "exclude"},
            "ok: algorithm dapo: baseline group, normalise group, objective ppo (clip 0.2, 0.28), "
            "aggregation token_mean, proximal recompute, cap mask (token, 0 to 5), dynamic sampling, "
            "truncated answers excluded, overlong penalty 1 over the last 20%",
        ),
    ],
)
def test_the_choice_is_summed_up_in_a_line(make: Make, algorithm: dict[str, Any], expected: str) -> None:
    assert expected in preflight(make(algorithm=algorithm))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"algorithm": {"overlong_buffer": 0.001}, "rollout": {"max_new_tokens": 50}},
            "algorithm.overlong_buffer = 0.001 has no part: it is less than one token of rollout.max_new_tokens = 50",
        ),
        (
            {"algorithm": {"preset": "dapo", "overlong_penalty": 0.0}},
            "algorithm.overlong_buffer = 0.2 has no part: algorithm.overlong_penalty is 0",
        ),
        (
            {"algorithm": {"preset": "rloo", "proximal": "behaviour"}},
            'algorithm.objective = "policy_gradient" with algorithm.proximal = "behaviour": it has no ratio, and every '
            "weight is 1, so nothing corrects for staleness",
        ),
    ],
)
def test_a_choice_that_does_nothing_is_noted(make: Make, sections: dict[str, Any], expected: str) -> None:
    assert expected in notes(make(**sections))
