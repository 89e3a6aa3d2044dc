"""Whether an interpreter's environment has vLLM: asked of the interpreter itself, which does not import it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PATIENCE = 10.0
"""Seconds for an interpreter to answer. One that does not is not judged: the machine may be busy."""
_ASK = "import importlib.util, sys; found = importlib.util.find_spec('vllm'); sys.exit(not (found and found.origin))"


def environment_problem(python: str) -> str | None:
    """Why no vLLM server can be started with `rollout.vllm.python` = `python`, in one line."""
    at = f"rollout.vllm.python = {python}"
    if not Path(python).is_file():
        return f"{at}: no such file; `make vllm` sets its environment up"
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        asked = subprocess.run(
            [python, "-c", _ASK], env=inherited, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return f"{at}: it cannot be run: {error.strerror or error}"
    return f"{at}: there is no vLLM in that environment; `make vllm` sets one up" if asked.returncode else None
