"""`fleuve simulate`: figures, comparison, picture and timeline; mistakes are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleuve.config.loader import load_settings
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


def test_figures_of_the_start_up_alone_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_command(run(simulate__steps=4), compare=False, plot=None, trace=None)
    assert "note: these 4 steps are the start of the run" in capsys.readouterr().out


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


def test_on_a_cpu_times_that_were_measured_are_used_and_without_any_it_warns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the quickstart, for which there are such times, the step comes out as it is on this kind of machine."""

    def printed(*flags: str) -> str:
        words = ["--steps", "12", "--rollout.workers", "1", *flags]
        simulate_command(load_settings("examples/quickstart.toml", words), compare=False, plot=None, trace=None)
        return capsys.readouterr().out

    known, unknown = printed(), printed("--simulate.model", "qwen-1.5b", "--rollout.request_timeout", "1e5")
    assert "note: times of builtin:small were measured" in known
    assert 0.3 < float(known.split("step ")[1].split()[0]) < 1.5
    assert "note: on a CPU a data sheet says little of how long qwen-1.5b takes" in unknown
    given = printed("--simulate.measured.decode_base", "0.001")
    assert "note:" not in given


def test_of_a_gpu_nothing_is_remarked(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_command(run(), compare=False, plot=None, trace=None)
    assert "note:" not in capsys.readouterr().out


def test_an_engine_without_room_for_an_answer_is_an_error() -> None:
    with pytest.raises(UserError, match=r"room for .* tokens of KV"):
        simulate_command(
            run(simulate__model="qwen-32b", rollout__max_new_tokens=30_000), compare=False, plot=None, trace=None
        )
