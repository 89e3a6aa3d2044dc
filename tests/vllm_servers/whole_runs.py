"""Training runs with vLLM, as a user would start them, every version of whose weights is kept for scoring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fleuve.engine.parameters import Parameters
from fleuve.modeling.loading import load_model
from fleuve.train.microbatch import make_micro_batches, sample_of
from fleuve.train.policy import Policy
from fleuve.types import Float32Array, Trajectory

ROOT = Path(__file__).parents[2]


class Keeper:
    """Links each published file of weights under another name as it appears, so that it outlives the run."""

    def __init__(self, published: Path, kept: Path) -> None:
        self.kept = kept
        self._published = published
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Keeper:
        self.kept.mkdir()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._over.wait(0.05):
            for path in self._published.glob("*/weights-*.safetensors"):
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(path, self.kept / path.name)

    def versions(self) -> dict[int, Path]:
        return {int(path.stem.split("-")[1]): path for path in self.kept.iterdir()}


@dataclass
class Run:
    """A run that has ended."""

    output: str
    directory: Path
    model: str
    weights: dict[int, Path]
    logs: str = field(default="", repr=False)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def answers(self) -> list[tuple[list[int], dict[str, Any]]]:
        """(prompt, answer) of everything trained."""
        found = []
        for path in sorted((self.directory / "rollouts").glob("*.jsonl")):
            for group in map(json.loads, path.read_text().splitlines()):
                found += [(group["prompt_ids"], answer) for answer in group["trajectories"]]
        return found

    def differences(self) -> Float32Array:
        """Of every trained token: |recorded log-probability − the trainer's, under the weights of the token's version|,
        `[tokens]`."""
        model, by_version = load_model(self.model, torch.float32), defaultdict(list)
        parameters = Parameters(model)
        for prompt, answer in self.answers:
            for version in set(answer["versions"]):
                by_version[version].append((prompt, answer))
        found = []
        for version in sorted(by_version):
            if version:
                parameters.load(load_file(self.weights[version]))
            for prompt, answer in by_version[version]:
                own = np.asarray(answer["versions"]) == version
                scored = scores(model, prompt, answer["output_ids"])
                found.append(np.abs(np.asarray(answer["logprobs"], np.float32) - scored)[own])
        return np.concatenate(found)


@torch.no_grad()
def scores(model: torch.nn.Module, prompt: list[int], output: list[int], temperature: float = 1.0) -> Float32Array:
    """Log-probabilities of `output`, `[tokens]`, by the code that training scores with."""
    count = len(output)
    trajectory = Trajectory(
        prompt_ids=np.asarray(prompt, np.int32),
        output_ids=np.asarray(output, np.int32),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        loss_mask=np.ones(count, np.bool_),
        finish_reason="length",
    )
    (batch,) = make_micro_batches([sample_of(trajectory, trajectory.loss_mask)], 10**6)
    scored: Float32Array = Policy(model, temperature, chunk=1024).logprobs(batch)[0].numpy()
    return scored


def train(
    tmp_path: Path,
    config: str,
    model: str,
    *flags: str,
    timeout: float,
    env: dict[str, str] | None = None,
    published: Path | None = None,
) -> Run:
    """Run `config` to its end; its weights are published in the new directory `published`."""
    published, directory = published or tmp_path / "published", tmp_path / "run"
    published.mkdir()
    (tmp_path / "config.toml").write_text(config)
    given = ("--run_dir", str(directory), "--weights.transport", "path", "--weights.path", str(published))
    command = [sys.executable, "-m", "fleuve", "train", str(tmp_path / "config.toml"), *given, *flags]
    with Keeper(published, published.with_name("kept")) as keeper:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout
        )
    logs = "".join(path.read_text(errors="replace")[-3000:] for path in (directory / "logs").glob("worker-*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return Run(done.stdout + done.stderr, directory, model, keeper.versions(), logs)
