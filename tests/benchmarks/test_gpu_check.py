"""The prepared check of a CUDA machine, on the CPU at toy size: every part of it runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks/results/gpu_check.json"


def check(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/gpu_check.sh", "--device", "cpu", "--size", "toy", *options]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=1800, check=False
    )


@pytest.mark.slow
def test_every_part_comes_to_its_end_and_the_table_says_what_was_measured(tmp_path: Path) -> None:
    before = RESULT.read_bytes() if RESULT.exists() else None
    try:
        done = check("--patience", "4", OUT=str(tmp_path))
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
    done = check("--parts", "engine,everything")
    assert done.returncode == 2
    assert "no such parts: everything" in done.stderr
