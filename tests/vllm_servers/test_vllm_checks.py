"""What `fleuve check` says of vLLM's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleuve.config.preflight import preflight
from fleuve.config.settings import Settings
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
