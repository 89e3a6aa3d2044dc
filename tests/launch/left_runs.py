"""Runs as one leaves them that was killed: journal, checkpoints, metrics and rollouts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection
from pathlib import Path

from fleuve.config.settings import Settings
from fleuve.control.journal import Admitted, Ready, State, Step
from fleuve.launch.checkpoints import Checkpoints
from fleuve.launch.files import Files
from fleuve.launch.history import Reading
from fleuve.launch.journal import JournalFile
from fleuve.launch.resume import Opened, open_run
from fleuve.launch.saver import Saver
from fleuve.types import Prompt


def make(root: Path, **tables: object) -> Settings:
    values: dict[str, object] = {
        "run_dir": str(root / "run"),
        "steps": 10,
        "model": {"path": "m"},
        "data": {"train": "d"},
    }
    return Settings.model_validate(values | tables)


class Weights:
    """The part of `contracts.Trainer` that checkpoints use."""

    version = 0

    async def save(self, path: Path) -> None:
        files = Files()
        files.make_directory(path / "model")
        files.write(path / "model" / "model.safetensors", [f"model {self.version}".encode() * 9])
        files.write(path / "trainer.safetensors", [f"state {self.version}".encode() * 9])


def leave_a_run(settings: Settings, steps: int, saved: Collection[int] = ()) -> Path:
    """As one that was killed after so many steps, another group in flight; with checkpoints of the versions `saved`,
    of which the newest two are kept. Returns its directory."""
    opened = open_run(settings, "no")
    run = opened.run
    journal = JournalFile(run.journal, 0, print)
    weights = Weights()
    saver = Saver(Checkpoints(run.checkpoints, 2), weights, journal, print)  # type: ignore[arg-type]
    for version in range(steps + 1):
        if version in saved:
            weights.version = version
            source = {"position": version}
            state = State(
                version=version, admitted=version, trained=version, dropped={}, source=source, next=journal.next
            )
            asyncio.run(saver.save(version, [state]))
        prompt = Prompt(id=f"p{version}", input_ids=[1], text="", answer="")
        journal.write(Admitted(group=version, prompt=prompt, version=version))
        if version < steps:
            journal.write(Ready(group=version, trajectories=[], admitted_version=version))
            journal.write(Step(version=version + 1, groups=[version], trained=[version]))
            run.rollout_file(version + 1).write_text(f'{{"group": {version}}}\n')
            with run.metrics.open("a") as file:
                file.write(f'{{"step":{version + 1},"time/elapsed":{10.5 * (version + 1)}}}\n')
    journal.close()
    run.release()
    return run.root


def read(opened: Opened, settings: Settings) -> Reading:
    """Its past, to the end."""
    reading = opened.history.open(whole=settings.reproducible)
    reading.read_to_the_end()
    return reading


def tree(root: Path) -> dict[str, bytes]:
    """Every file but the lock, by its name."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != ".lock"}


def copy_of(run: Path, to: Path) -> Path:
    """The same run elsewhere."""
    return Path(shutil.copytree(run, to))
