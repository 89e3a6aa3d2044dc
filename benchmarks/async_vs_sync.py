"""Asynchronous training against the best synchronous set-up: same model, data, cores, number of trained groups.

    python benchmarks/async_vs_sync.py [--quick] [--config examples/quickstart.toml]

Asynchronous: η = 4, rollout and training at the same time, each on its own cores. Synchronous: η = 0, colocated: there
generation and training have all cores in turn; it is measured with one engine on all cores and with one engine a
core, and the better of the two is compared. Both run as `fleuve train`, turn about. The learning rate is next to
nothing, so that answer lengths stay those of the initial model in every run. Tokens of the first steps, in which
the pipeline fills, are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _report import report, spread

ASYNC = {"async, eta 4, disaggregated": ["--control.max_staleness", "4"]}
SYNC = {
    "sync, colocated, 1 engine": ["--rollout.workers", "1"],
    "sync, colocated, 1 engine a core": ["--rollout.workers", str(len(os.sched_getaffinity(0)))],
}
SYNC_FLAGS = ["--control.max_staleness", "0", "--launch.placement", "colocated"]
SYSTEMS = ASYNC | {name: SYNC_FLAGS + flags for name, flags in SYNC.items()}


def train(config: str, flags: list[str], steps: int, run_dir: Path) -> list[dict[str, float]]:
    """One training run in which next to nothing is learnt; its metrics, a mapping a step."""
    command = [sys.executable, "-m", "fleuve", "train", config, "--run_dir", str(run_dir), "--steps", str(steps)]
    command += ["--trainer.learning_rate", "1e-12", "--evaluate.every", "0", "--observe.live", "off", *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def run(config: str, flags: list[str], steps: int, warmup: int) -> dict[str, float]:
    """One training run; trained tokens a second after `warmup` steps, and where the time went."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = train(config, flags, steps, Path(scratch) / "run")
    first, counted = rows[warmup - 1], rows[warmup:]
    seconds = counted[-1]["time/elapsed"] - first["time/elapsed"]
    return {
        "tokens_per_second": sum(r["tokens/trained"] for r in counted) / seconds,
        "seconds_per_step": seconds / len(counted),
        "wait_share": sum(r["time/wait_for_batch"] for r in counted) / seconds,
        "staleness_mean": sum(r["staleness/mean"] for r in counted) / len(counted),
        "staleness_max": max(r["staleness/max"] for r in counted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/quickstart.toml")
    parser.add_argument("--quick", action="store_true", help="one short round (a minute)")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    steps = args.steps or (8 if args.quick else 24)
    warmup, rounds = (3 if args.quick else 8), args.rounds or (1 if args.quick else 3)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    for _ in range(rounds):
        for name, flags in SYSTEMS.items():
            results[name].append(run(args.config, flags, steps, warmup))
    rows = []
    for name, runs in results.items():
        rows.append({"system": name, **{key: spread([r[key] for r in runs])["median"] for key in runs[0]}})
    (fast,) = ASYNC
    ratios = {
        name: spread(
            [a["tokens_per_second"] / s["tokens_per_second"] for a, s in zip(results[fast], results[name], strict=True)]
        )
        for name in SYNC
    }
    best = min(ratios, key=lambda name: ratios[name]["median"])
    headline = {
        "ratio": ratios[best]["median"],
        "ratio_min": ratios[best]["min"],
        "ratio_max": ratios[best]["max"],
        "best_sync": best,
        "trained_groups_counted_steps": steps - warmup,
    }
    report("async_vs_sync", headline, rows)


if __name__ == "__main__":
    main()
