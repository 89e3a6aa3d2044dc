"""`fleuve simulate`: figures, comparison, picture and timeline; mistakes are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.simulate.simulate_command import simulate_command
from fleuve.simulate.systems import changed, systems


def run(**changes: object) -> Settings:
    settings = Settings.model_validate(
        {
            "run_dir": "unused",
            "steps": 500,
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {"group_size": 2, "max_new_tokens": 500, "dtype": "bfloat16"},
            "control": {"batch_size": 4, "max_staleness": 1},
            "trainer": {"dtype": "bfloat16", "token_budget": 8192},
            "simulate": {"model": "qwen-1.5b", "hardware": "h800", "gpus": 4, "steps": 7},
        }
    )
    return changed(settings, {name.replace("__", "."): value for name, value in changes.items()})


def test_figures_say_that_they_are_extrapolated(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_command(run(), compare=False, plot=None, trace=None)
    printed = capsys.readouterr().out
    for what in ("500 steps", "trained tokens a second", "trainer", "3 rollout engines", "tokens by staleness"):
        assert what in printed
    assert "7 steps simulated" in printed
    assert "the last 2 counted; extrapolated from them to 500 steps" in printed
    assert "\x1b" not in printed


def test_the_comparison_has_a_line_for_each_system_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "systems.png"
    simulate_command(run(), compare=True, plot=picture, trace=None)
    lines = capsys.readouterr().out.splitlines()
    for name in systems(run()):
        assert any(line.startswith(name) for line in lines), name
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_files_that_cannot_be_written_are_found_out_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--plot .*no such directory"):
        simulate_command(run(), compare=False, plot=tmp_path / "nowhere" / "a.png", trace=None)
    with pytest.raises(UserError, match="--trace is of one run"):
        simulate_command(run(), compare=True, plot=None, trace=tmp_path / "trace.json")


def test_what_would_not_fit_into_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_command(run(simulate__model="qwen-32b"), compare=False, plot=None, trace=None)
    assert "note: it would not fit: training on 1 needs" in capsys.readouterr().out


def test_an_engine_without_room_for_an_answer_is_an_error() -> None:
    with pytest.raises(UserError, match=r"room for .* tokens of KV"):
        simulate_command(
            run(simulate__model="qwen-32b", rollout__max_new_tokens=30_000), compare=False, plot=None, trace=None
        )
