"""A run's checkpoints: the trainer's part, the controller's part, and `COMMITTED` last.

A directory without that marker is not a checkpoint: whatever wrote it did not finish. The newest `keep` are kept.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from fleuve.contracts import Trainer

COMMITTED = "COMMITTED"


class Checkpoints:
    """The `checkpoints/` directory of a run."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    async def save(self, version: int, trainer: Trainer, controller_state: dict[str, object]) -> Path:
        """Write `step-VERSION` whole, then drop the oldest; the one already there for this version is kept.

        Raises:
            OSError: the disk is full or not writable. Earlier checkpoints are untouched.
            TrainerError: the trainer could not write its part.
        """
        path = self._directory / f"step-{version:06d}"
        if (path / COMMITTED).exists():
            return path
        if path.exists():
            shutil.rmtree(path)
        await trainer.save(path)
        _write(path / "controller.json", json.dumps(controller_state, indent=1))
        _write(path / COMMITTED, f"{version}\n")
        for old in committed(self._directory)[: -self._keep]:
            (old / COMMITTED).unlink()
            shutil.rmtree(old)
        return path


def committed(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(marker.parent for marker in directory.glob(f"step-*/{COMMITTED}"))


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
