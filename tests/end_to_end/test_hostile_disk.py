"""A run whose disk is full, or whose directory is somebody's already: one clear error, and what is saved stays."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from runs import command, environment, write_config

from fleuve.config.loader import dump_settings, load_settings
from fleuve.observe.rundir import create_run_directory


def on_disk(directory: Path, options: str, *arguments: str) -> list[str]:
    """`arguments` where `directory` is a file system with these mount options, that goes with the process."""
    mount = f'mount -t tmpfs -o {options} tmpfs {directory} && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *arguments]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Where a file system can be mounted; skips where none can."""
    disk = tmp_path / "disk"
    disk.mkdir()
    probe = on_disk(disk, "size=100k", "true")
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs a file system of its own")
    return disk


def test_a_disk_that_fills_up_ends_the_run_with_exit_code_1_and_says_what_is_saved(tmp_path: Path, disk: Path) -> None:
    config = write_config(tmp_path)
    flags = ["--run_dir", str(disk / "run"), "--steps", "300", "--rollout.max_new_tokens", "48"]
    done = subprocess.run(
        on_disk(disk, "size=120k", *command(config, *flags)),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert "cannot be written: No space left on device" in errors[0]
    assert "no checkpoint is saved" in done.stderr
    assert "Traceback" not in output
    assert "step   1/300" in output  # it had begun


@pytest.mark.parametrize("resume", ["auto", "no"])
def test_a_second_run_in_the_same_directory_refuses_and_touches_nothing(tmp_path: Path, resume: str) -> None:
    config = write_config(tmp_path)
    first = create_run_directory(tmp_path / "run", dump_settings(load_settings(config)))
    first.metrics.write_text("the first one's")
    before = {path: path.stat().st_mtime_ns for path in first.root.rglob("*")}
    try:
        second = subprocess.run(
            command(config, "--resume", resume),
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        first.release()
    assert second.returncode == 2, second.stderr
    assert f"a run is going on in {tmp_path / 'run'} (process {os.getpid()})" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in first.root.rglob("*")} == before


def test_a_directory_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path, disk: Path) -> None:
    config = write_config(tmp_path)
    arguments = command(config, "--run_dir", str(disk / "run"))
    done = subprocess.run(
        on_disk(disk, "size=100k,ro", *arguments),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith(f"error: run_dir = {disk / 'run'}: ")
