"""Every command that serves: on an address that other machines reach it wants a token before it does anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleuve.config.settings import Settings

SETTINGS = {"run_dir": "run", "model": {"path": "builtin:small"}, "data": {"train": "procedural:chain"}}


def trainer() -> list[str]:
    options = {"settings": Settings.model_validate(SETTINGS).model_dump(mode="json"), "host": "0.0.0.0", "port": 0}
    return ["-m", "fleuve.train", json.dumps(options)]


COMMANDS = {
    "FLEUVE_TOKEN serve": ["-m", "fleuve", "serve", "builtin:small", "--host", "0.0.0.0", "--port", "0"],
    "FLEUVE_REWARDS_TOKEN rewards": ["-m", "fleuve", "rewards", "serve", "--host", "0.0.0.0", "--port", "0"],
    "FLEUVE_TOKEN trainer": trainer(),
}


@pytest.mark.parametrize("who", COMMANDS)
def test_without_a_token_it_is_one_clear_line(who: str, tmp_path: Path) -> None:
    variable = who.split()[0]
    env = {k: v for k, v in os.environ.items() if not k.startswith(variable)} | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, *COMMANDS[who]], capture_output=True, text=True, timeout=60, check=False, env=env, cwd=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: listening on 0.0.0.0 lets other machines in, which needs a token: set ")
    assert f"set {variable}, or {variable}_FILE" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
