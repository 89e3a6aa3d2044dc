"""A preset fills in what is left open; what is said, in the file or by a flag, holds."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from fleuve.algorithms.losses import PolicyLoss
from fleuve.config.loader import dump_settings, load_settings
from fleuve.config.presets import PRESETS, Preset
from fleuve.config.settings import AlgorithmSettings, Settings
from fleuve.errors import UserError
from fleuve.train.parts import policy_loss_of

FILE = """
run_dir = "R"
[model]
path = "M"
[data]
train = "T"
[algorithm]
"""


def load(tmp_path: Path, algorithm: str = "", *flags: str) -> AlgorithmSettings:
    path = tmp_path / "config.toml"
    path.write_text(FILE + algorithm)
    return load_settings(path, flags).algorithm


def test_every_name_has_a_preset_and_every_preset_is_valid() -> None:
    assert set(get_args(Preset)) == set(PRESETS)
    for name, values in PRESETS.items():
        settings = AlgorithmSettings(preset=name)
        assert {key: getattr(settings, key) for key in values} == values


def test_no_two_presets_are_the_same() -> None:
    resolved = [AlgorithmSettings(preset=name).model_dump(exclude={"preset"}) for name in PRESETS]
    assert all(a != b for i, a in enumerate(resolved) for b in resolved[:i])


def test_the_default_is_grpo_s() -> None:
    assert AlgorithmSettings() == AlgorithmSettings(preset="grpo")


def test_what_the_file_says_goes_before_the_preset(tmp_path: Path) -> None:
    algorithm = load(tmp_path, 'preset = "dapo"\ndynamic_sampling = false\nclip_high = 0.4')
    assert (algorithm.dynamic_sampling, algorithm.clip_high, algorithm.overlong_buffer) == (False, 0.4, 0.2)


def test_what_a_flag_says_goes_before_both(tmp_path: Path) -> None:
    flags = ("--algorithm.preset", "gspo", "--algorithm.clip_low", "0.1")
    algorithm = load(tmp_path, "clip_low = 0.05\nclip_high = 0.06", *flags)
    assert (algorithm.objective, algorithm.clip_low, algorithm.clip_high) == ("gspo", 0.1, 0.06)


@pytest.mark.parametrize("before", PRESETS)
def test_a_flag_can_choose_another_preset_for_the_resolved_settings_of_a_run(before: Preset, tmp_path: Path) -> None:
    minimal = {"run_dir": "R", "model": {"path": "M"}, "data": {"train": "T"}}
    run = Settings.model_validate({**minimal, "algorithm": {"preset": before, "dual_clip": 3.0}})
    path = tmp_path / "config.toml"
    path.write_text(dump_settings(run))
    for name in PRESETS:
        chosen = load_settings(path, ["--algorithm.preset", name]).algorithm
        assert chosen == AlgorithmSettings(preset=name, dual_clip=3.0)


def test_a_misspelt_preset_names_the_nearest(tmp_path: Path) -> None:
    for wrong in ("dpao", "DAPO"):
        with pytest.raises(UserError, match="did you mean dapo"):
            load(tmp_path, f'preset = "{wrong}"')
    with pytest.raises(UserError, match=r"algorithm\.preset"):
        load(tmp_path, "preset = 3")


def test_second_moment_masking_needs_the_proximal_forward(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'needs algorithm\.proximal = "recompute"'):
        load(tmp_path, 'cap = "second_moment"\nproximal = "interpolate"')


def test_a_run_in_which_only_the_critic_would_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"only the critic would learn in all of the steps = 80"):
        load(tmp_path, 'preset = "ppo"\n[critic]\nwarmup_steps = 80')


def test_the_overlong_buffer_is_a_share(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"overlong_buffer = 4096: must be less than 1; it is a share of rollout\.max"):
        load(tmp_path, "overlong_buffer = 4096")


def test_the_loss_has_the_defaults_of_the_settings() -> None:
    minimal = {"run_dir": "R", "model": {"path": "M"}, "data": {"train": "T"}}
    settings = Settings.model_validate(minimal)
    assert policy_loss_of(settings) == PolicyLoss(horizon=settings.rollout.max_new_tokens)
