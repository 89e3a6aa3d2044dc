"""What the scenarios of `rank_scenarios` come to on each mesh, and when two results are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Found = Callable[[str, int | str], list[Any]]


def played(scenarios: str, directory: Path) -> Path:
    """`directory`, after a set of scenarios has been played in it."""
    playing = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("in_ranks.py")), str(directory), scenarios],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert playing.returncode == 0, playing.stderr[-4000:]
    return directory


def results_in(directory: Path) -> Found:
    """What a scenario returned on each rank of a mesh (0: one that is alone)."""

    def load(name: str, mesh: int | str) -> list[Any]:
        count = int(str(mesh).partition("x")[0])
        files = (directory / f"{name}-{mesh}-{rank}.pt" for rank in range(max(count, 1)))
        return [torch.load(file, weights_only=False) for file in files]

    return load


def assert_one(ranks: list[Any]) -> None:
    """All ranks of a mesh hold the same weights and say the same, to the last bit."""
    first, *others = ranks
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert all(torch.equal(other["weights"][name], w) for name, w in first["weights"].items())


def assert_come_to(ours: list[Any], alone: Any) -> None:
    """Ranks that share micro-batches say the same, and come to what one that is alone comes to."""
    assert all(one["metrics"] == ours[0]["metrics"] for one in ours)
    assert_same(ours[0], alone, metrics=2e-5, weights=1e-5)


def assert_same(ours: Any, theirs: Any, metrics: float, weights: float) -> None:
    """Losses, norms and every other metric, relatively; weights, absolutely."""
    for a, b in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=metrics, abs=metrics), name
    for name in theirs["weights"]:
        assert torch.allclose(ours["weights"][name], theirs["weights"][name], atol=weights, rtol=0), name
