"""What `fleuve check` says of vLLM's settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleuve.config.preflight import preflight
from fleuve.config.settings import Settings
from fleuve.config.vllm_checks import vllm_heads_problem
from fleuve.config.vllm_environment import environment_problem
from fleuve.errors import UserError


def settings(tmp_path: Path, **rollout: object) -> Settings:
    return Settings.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": "builtin:small"},
            "data": {"train": "procedural:chain"},
            "rollout": {"engine": "vllm", **rollout},
            "control": {"max_staleness": 0},
        }
    )


def test_an_environment_that_is_not_there_is_named_with_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`make vllm` sets its environment up"):
        preflight(settings(tmp_path, vllm={"python": str(tmp_path / "python")}))


def test_a_context_that_leaves_no_room_is_found(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leaves no room for a prompt"):
        preflight(settings(tmp_path, urls=["http://a:1"], vllm={"context": 256}))


def test_servers_that_run_already_need_no_environment_and_what_is_not_exact_is_said(tmp_path: Path) -> None:
    said = preflight(settings(tmp_path, urls=["http://a:1"], vllm={"python": "nowhere"}))
    assert any("not the same bit for bit" in line for line in said)


def test_an_environment_without_vllm_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    """Whatever of vLLM's name lies in this process's own path."""
    (tmp_path / "mine" / "vllm").mkdir(parents=True)
    (tmp_path / "mine" / "vllm" / "__init__.py").touch()
    with pytest.raises(UserError) as error:
        preflight(settings(tmp_path, vllm={"python": sys.executable}))
    assert str(error.value) == (
        f"rollout.vllm.python = {sys.executable}: there is no vLLM in that environment; `make vllm` sets one up"
    )
    flags = ("--rollout.engine", "vllm", "--rollout.vllm.python", sys.executable, "--run_dir", str(tmp_path / "run"))
    found = subprocess.run(
        [sys.executable, "-m", "fleuve.cli", "train", "examples/quickstart.toml", *flags],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "mine")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, (tmp_path / "run").exists()) == (2, False)
    assert "there is no vLLM in that environment" in found.stderr


def test_an_environment_is_asked_and_not_imported(tmp_path: Path) -> None:
    """A package that would fail, or take a minute, on import is found all the same."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True, timeout=60)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    python = str(tmp_path / "env" / "bin" / "python")
    assert "no vLLM" in str(environment_problem(python))
    (packages / "vllm").mkdir()  # such as an uninstalled one leaves
    assert "no vLLM" in str(environment_problem(python))
    (packages / "vllm" / "__init__.py").write_text("raise SystemExit(1)")
    assert environment_problem(python) is None


def test_what_is_no_program_is_no_interpreter(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("")
    assert environment_problem(str(tmp_path / "python")) == (
        f"rollout.vllm.python = {tmp_path / 'python'}: it cannot be run: Permission denied"
    )


@pytest.mark.parametrize(
    ("heads", "pairs", "good", "bad", "most"),
    [(2, 2, 2, 3, "1, 2"), (64, 8, 16, 24, "1, 2, 4, 8, 16, 32, 64"), (12, 4, 12, 6, "1, 2, 4, 12")],
)
def test_the_processes_of_a_server_share_its_model_s_heads(
    tmp_path: Path, heads: int, pairs: int, good: int, bad: int, most: str
) -> None:
    """Fewer key-value heads are copied, each as often; `bad` of the last would copy some more often than others."""
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads, "num_key_value_heads": pairs}))
    assert vllm_heads_problem(settings(tmp_path, vllm={"tensor_parallel": good}), tmp_path) is None
    problem = str(vllm_heads_problem(settings(tmp_path, vllm={"tensor_parallel": bad}), tmp_path))
    assert problem.startswith(
        f"rollout.vllm.tensor_parallel = {bad}: the model has {heads} attention heads and {pairs}"
    )
    assert problem.endswith(f"it can be {most}")
    others = settings(tmp_path, urls=["http://a:1"], vllm={"tensor_parallel": bad})
    assert vllm_heads_problem(others, tmp_path) is None, "servers of the user's have their own"


def test_heads_that_cannot_be_shared_are_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.vllm\.tensor_parallel = 3: the model has"):
        preflight(settings(tmp_path, urls=[], vllm={"tensor_parallel": 3}))
