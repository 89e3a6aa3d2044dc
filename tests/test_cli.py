"""The command line: quick answers, clear errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleuve.cli import app

ROOT = Path(__file__).parent.parent

CONFIG = """\
run_dir = "runs/test"
[model]
path = "builtin:nothing-of-that-name"
[data]
train = "procedural:chain"
"""


def fleuve(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fleuve", *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "test.toml"
    path.write_text(CONFIG)
    return path


def test_every_command_has_help() -> None:
    run = CliRunner().invoke
    listing = run(app, ["--help"]).output
    for command in ("train", "check", "sft", "serve", "eval", "report", "fetch"):
        assert command in listing
        for words in ([command, "--help"], [command, "something", "--help"]):
            assert f"{command} [OPTIONS]" in run(app, words).output


def test_bad_settings_are_one_line_each_and_exit_code_2(config: Path) -> None:
    for command in ("check", "train"):
        result = fleuve(command, str(config), "--control.max_staleness", "-1", "--steps=none")
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.splitlines() == [
            'error: --steps: steps = "none": must be a whole number',
            "error: --control.max_staleness: control.max_staleness = -1: must be 0 or more",
        ]


def test_what_is_wrong_on_disk_is_found_before_anything_starts(config: Path, tmp_path: Path) -> None:
    result = fleuve("train", str(config), "--run_dir", str(tmp_path / "run"))
    assert result.returncode == 2
    assert "builtin:nothing-of-that-name: no such built-in model" in result.stderr
    assert not (tmp_path / "run").exists()


def test_check_knows_a_supervised_run_by_its_file() -> None:
    result = CliRunner().invoke(app, ["check", str(ROOT / "examples" / "sft_small.toml")])
    assert result.exit_code == 0
    assert "ok: model built anew, saved to " in result.output


def test_the_module_of_the_command_line_is_the_command_line() -> None:
    words = [sys.executable, "-m", "fleuve.cli", "check", "no_such.toml"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (2, fleuve("check", "no_such.toml").stderr)
    assert run.stderr.startswith("error: no such file: no_such.toml")


def test_flags_before_the_file_are_explained() -> None:
    result = fleuve("train", "--steps", "3", "examples/quickstart.toml")
    assert result.returncode == 2
    assert result.stderr == "error: flags come last: fleuve train CONFIG --steps ...\n"


def test_check_imports_no_torch_and_answers_at_once(config: Path) -> None:
    code = (
        "import sys, fleuve.cli\n"
        f"sys.argv = ['fleuve', 'check', {str(config)!r}]\n"
        "try: fleuve.cli.main()\n"
        "except SystemExit as end: print(end.code, sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    began = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "2 []\n"
    assert time.monotonic() - began < 3  # under 1 s on a quiet machine
