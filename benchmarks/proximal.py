"""What the proximal policy costs: `recompute`, `interpolate` and `behaviour`, as shares of a training step.

    python benchmarks/proximal.py [--quick]

The quickstart's model and batch shape (24 groups of 8 answers, log-normal lengths), whole steps of the trainer on one
core, the three ways in turn. Every answer has an advantage and tokens of several versions, so none is passed over. The
first minibatch's own forward pass is its proximal policy, so `recompute` pays for the others only: (k − 1)/k of a
forward pass over the batch with k minibatches.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch comes

import numpy as np
from _report import report, spread

from fleuve.config.loader import load_settings
from fleuve.config.settings import Settings
from fleuve.train.trainer import Trainer
from fleuve.types import Batch, Group, Prompt, Trajectory
from fleuve.weights.directory import make_directory
from fleuve.weights.store import WeightStore

CONFIG = Path(__file__).parent.parent / "examples" / "quickstart.toml"
WAYS = ("recompute", "interpolate", "behaviour")
MINIBATCHES = (1, 2, 4)
VERSION, OLDEST, PROMPT, VOCABULARY = 8, 4, 16, 30


def settings_of(way: str, minibatches: int) -> Settings:
    """The quickstart's, with next to no learning, so that every step is of the same model."""
    flags = [f"--algorithm.proximal={way}", f"--trainer.minibatches={minibatches}", "--trainer.learning_rate=1e-12"]
    return load_settings(CONFIG, flags)


def make_batch(settings: Settings, seed: int, version: int) -> Batch:
    """Random answers of heavy-tailed length, half of them right."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(settings.control.batch_size):
        prompt = rng.integers(3, VOCABULARY, PROMPT).astype(np.int32)
        answers = []
        for sample in range(settings.rollout.group_size):
            length = int(np.clip(rng.lognormal(np.log(40), 0.7), 2, settings.rollout.max_new_tokens))
            answers.append(
                Trajectory(
                    prompt_ids=prompt,
                    output_ids=rng.integers(3, VOCABULARY, length).astype(np.int32),
                    logprobs=(-np.log(VOCABULARY) + 0.1 * rng.standard_normal(length)).astype(np.float32),
                    versions=np.sort(rng.integers(version - OLDEST, version + 1, length)).astype(np.int32),
                    loss_mask=np.ones(length, np.bool_),
                    finish_reason="stop",
                    reward=float(sample % 2),
                )
            )
        problem = Prompt(id=str(number), input_ids=prompt.tolist(), text="", answer="")
        groups.append(Group(id=number, prompt=problem, trajectories=answers, admitted_version=version - OLDEST))
    return Batch(version=version, groups=groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rounds")
    rounds = 2 if parser.parse_args().quick else 9
    rows: list[dict[str, object]] = []
    headline: dict[str, float] = {}
    store = WeightStore(make_directory(), keep=1)
    try:
        for minibatches in MINIBATCHES:
            trainers = {way: Trainer(settings_of(way, minibatches), store) for way in WAYS}
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            shares: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(rounds + 1):
                for way, trainer in trainers.items():
                    trainer.version = VERSION
                    batch = make_batch(trainer.settings, seed=turn, version=VERSION)
                    began = time.perf_counter()
                    metrics = trainer.step(batch).metrics
                    took = time.perf_counter() - began
                    if turn:  # the first warms up
                        seconds[way].append(took)
                        shares[way].append(metrics["time/proximal"] / took)
            for way in WAYS:
                ratio = spread([b / a for a, b in zip(seconds[way], seconds["recompute"], strict=True)])
                rows.append(
                    {
                        "minibatches": minibatches,
                        "proximal": way,
                        "seconds a step": spread(seconds[way])["median"],
                        "proximal's share": spread(shares[way])["median"],
                        "recompute / this": ratio["median"],
                        "min": ratio["min"],
                        "max": ratio["max"],
                    }
                )
            saved = spread([1 - b / a for a, b in zip(seconds["recompute"], seconds["interpolate"], strict=True)])
            headline[f"proximal_share_{minibatches}_minibatches"] = spread(shares["recompute"])["median"]
            headline[f"interpolate_saves_{minibatches}_minibatches"] = saved["median"]
    finally:
        store.close()
    report("proximal", headline, rows)


if __name__ == "__main__":
    main()
