"""Adapters against all weights: what is published, and how the fraction solved rises, on the quickstart's model.

    python benchmarks/lora.py [--quick] [--seeds 1] [--jobs 2]

Each arm trains `examples/quickstart.toml` for 40 steps, asynchronously, with its own learning rate; the versions of the
last steps are evaluated on problems that training never sees. Time is virtual (`_virtual_run.py`): the figures do not
depend on how busy the machine is. `update` is the file that each version is published as.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch comes

from _report import report

from fleuve.config.loader import load_settings
from fleuve.config.settings import Settings

CONFIG = Path(__file__).parent.parent / "examples" / "quickstart.toml"
FULL = "all weights"
ARMS = {
    FULL: ["--trainer.learning_rate=1e-4"],
    "rank 8": ["--lora.rank=8", "--trainer.learning_rate=1e-3"],
}
STEPS, PROBLEMS = 40, 128
LATEST = (4, 0)
"""How many steps before the last the evaluated versions lie."""


def settings_of(arm: str, seed: int, steps: int) -> Settings:
    """The quickstart's, with an arm's flags."""
    return load_settings(CONFIG, [*ARMS[arm], f"--seed={seed}", f"--steps={steps}"])


def update_bytes(settings: Settings) -> int:
    """Of the file that a version is published as."""
    from fleuve.train.trainer import Trainer
    from fleuve.weights.store import WeightStore

    with tempfile.TemporaryDirectory() as scratch:
        file = Trainer(settings, WeightStore(Path(scratch) / "w", keep=1)).publish()
    assert file is not None
    return file.bytes


def work(arm: str, seed: int, steps: int, problems: int) -> dict[str, Any]:
    """One run, in a process of its own; an arm of zero steps is the model that all begin with."""
    from _virtual_run import evaluate_initial, run

    settings = settings_of(arm, seed, max(steps, 1))
    if not steps:
        return {"held_out": evaluate_initial(settings, problems=problems, samples=2).accuracy}
    versions = [steps - back for back in LATEST if back < steps]
    result = run(settings, evaluated=versions, problems=problems, samples=2)
    solved = [row["reward/solved"] for row in result.steps.metrics]
    return {
        "update": update_bytes(settings),
        "held_out": statistics.fmean(e.accuracy or 0.0 for e in result.evaluations.values()),
        "solved": solved,
        "staleness": result.steps.realised()[0],
        "cpu_seconds": result.cpu_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps (a minute)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    steps, problems = (4, 32) if args.quick else (STEPS, PROBLEMS)
    seeds = range(1 if args.quick else args.seeds)
    fork = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=fork) as pool:
        initial = pool.submit(work, FULL, 0, 0, problems)
        runs = {arm: [pool.submit(work, arm, seed, steps, problems) for seed in seeds] for arm in ARMS}
        results = {arm: [future.result() for future in futures] for arm, futures in runs.items()}
    whole, rows = results[FULL][0]["update"], []
    for arm, found in results.items():
        curve = [statistics.fmean(step) for step in zip(*(r["solved"] for r in found), strict=True)]
        rows.append(
            {
                "learns": arm,
                "learning rate": settings_of(arm, 0, 1).trainer.learning_rate,
                "update, kB": found[0]["update"] / 1000,
                "share": found[0]["update"] / whole,
                "solved, first 5 steps": statistics.fmean(curve[:5]),
                "last 5 steps": statistics.fmean(curve[-5:]),
                "held out": statistics.fmean(r["held_out"] for r in found),
                "held out, min": min(r["held_out"] for r in found),
                "held out, max": max(r["held_out"] for r in found),
                "staleness": statistics.fmean(r["staleness"] for r in found),
            }
        )
    lora = rows[1]
    headline = {
        "initial_held_out": initial.result()["held_out"],
        "full_held_out": rows[0]["held out"],
        "rank_8_held_out": lora["held out"],
        "rank_8_update_share": lora["share"],
        "steps": steps,
        "seeds": len(seeds),
    }
    report("lora", headline, rows)


if __name__ == "__main__":
    main()
