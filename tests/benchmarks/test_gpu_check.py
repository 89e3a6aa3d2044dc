"""The prepared check of a CUDA machine, on the CPU at toy size: every part of it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks/results/gpu_check.json"


TOY = ("--device", "cpu", "--size", "toy")


def check(*options: str, timeout: float = 1800, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/gpu_check.sh", *options]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))


@pytest.mark.slow
def test_every_part_comes_to_its_end_and_the_table_says_what_was_measured(tmp_path: Path) -> None:
    before = RESULT.read_bytes() if RESULT.exists() else None
    try:
        done = check(*TOY, "--patience", "4", OUT=str(tmp_path))
    finally:
        if before is None:
            RESULT.unlink(missing_ok=True)
        else:
            RESULT.write_bytes(before)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["benchmark"] == "gpu_check"
    assert last["headline"]["good"] is True
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"conformance", "train", "engine", "trainer"}
    assert any(row["what"] == "the engine's contract" and row["measured"] == "all hold" for row in rows)
    assert [row["measured"] for row in rows if row["what"] == "steps"] == [2]
    compared = [row for row in rows if "predicted" in row]
    assert len(compared) >= 8
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in compared)


def test_an_unknown_part_is_one_clear_line() -> None:
    done = check(*TOY, "--parts", "engine,everything")
    assert done.returncode == 2
    assert "no such parts: everything" in done.stderr


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
@pytest.mark.parametrize("options", [(), ("--device", "cuda"), ("--device=cuda", "--size", "toy")])
def test_without_a_gpu_one_line_says_so_before_an_environment_is_made(options: tuple[str, ...]) -> None:
    was_there = (ROOT / ".venv-gpu").exists()
    done = check(*options, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "there is no NVIDIA GPU here" in line
    assert "--device cpu --size toy" in line
    assert (ROOT / ".venv-gpu").exists() == was_there


def test_a_device_is_named_either_way() -> None:
    done = check("--device=cpu", "--size=toy", "--parts=everything")
    assert done.returncode == 2
    assert "no such parts: everything" in done.stderr
