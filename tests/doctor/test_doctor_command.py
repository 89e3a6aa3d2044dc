"""`fleuve doctor` as it is run: exit codes, JSON, and that nothing it starts outlives it or holds it up."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fleuve.doctor.command import NodeFinding, table, vllm_version
from fleuve.doctor.probe import run_devices, run_reduction

CONFIG = """
run_dir = "{run_dir}"
[model]
path = "builtin:small"
[data]
train = "procedural:chain"
"""


def doctor(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "config.toml").write_text(CONFIG.format(run_dir=tmp_path / "run"))
    command = [sys.executable, "-m", "fleuve", "doctor", "--json", str(tmp_path / "config.toml"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_this_machine_is_examined_for_a_run(tmp_path):
    done = doctor(tmp_path)
    found = {line["check"]: line for line in json.loads(done.stdout)}
    assert found["torch"]["verdict"] in ("ok", "warn")
    assert found["gloo"]["found"].startswith("4 MB over 2 ranks")
    assert "needed" in found["shared memory"]["found"]
    assert "needed" in found["disk"]["found"]
    assert done.returncode == (1 if any(line["verdict"] == "fail" for line in found.values()) else 0), done.stdout


def test_what_fails_is_the_exit_code(tmp_path):
    done = doctor(tmp_path, "--rollout.group_size", "10000000", "--deadline", "1")
    failed = [line["check"] for line in json.loads(done.stdout) if line["verdict"] == "fail"]
    assert failed == ["open files"]
    assert done.returncode == 1


def test_a_probe_that_hangs_is_ended_with_all_it_started():
    began = time.monotonic()
    assert run_devices(0.2).problem == "no end within 0.2 s"
    assert run_reduction("gloo", 2, 0.2).problem == "no end within 0.2 s"
    assert time.monotonic() - began < 10
    assert [p for p in psutil.Process().children(recursive=True) if "fleuve.doctor.probe" in p.cmdline()] == []


@pytest.mark.parametrize("python", ["/nowhere/python", sys.executable])
def test_an_environment_without_vllm_has_no_version(python):
    assert vllm_version(python) is None


def test_the_table_names_nodes_where_there_are_several_and_counts():
    lines = [
        NodeFinding("a", "disk", "1 GiB free", "fail", "another run_dir"),
        NodeFinding("b", "torch", "2.13.0", "ok", ""),
    ]
    shown = table(lines).splitlines()
    assert shown[0] == "a:"
    assert shown[1].startswith("FAIL  disk ")
    assert shown[2].strip() == "→ another run_dir"
    assert shown[3] == "b:"
    assert shown[-1] == "1 ok, 0 to watch, 1 failed"
    assert "a:" not in table(lines[:1]).splitlines()
