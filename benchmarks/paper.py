"""The simulator against the published figures of the asynchronous system that Fleuve is built after.

    python benchmarks/paper.py [--quick] [--scale 8]

Two constants are fitted, both on the first row of the paper's table: the trainer's utilisation on its asynchronous
hours, the overhead of a decode step on its synchronous ones. The mean length of answers is not fitted but follows from
two published figures: what a step of the first row takes, times the tokens a second at its η. All else is predicted:
the other rows, throughput against η, what interruption is worth, how it scales. Every prediction is reported, misses
included, in `benchmarks/results/paper.json`, `docs/simulator.md` (between the markers) and `docs/paper.png`. The parts
can be done anew one by one (`--only eta`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _cluster import (
    ETAS,
    GROUPS,
    INTERRUPTION,
    LONGEST,
    NODE,
    PROMPT,
    PUBLISHED,
    SAMPLES,
    SYNCHRONOUS,
    UNBOUNDED,
    Constants,
    Published,
    cluster,
    on_slice,
)
from _report import RESULTS, report

DOCS = Path(__file__).parent.parent / "docs"
FIRST = PUBLISHED[0]
MEAN = ETAS[FIRST.eta] * 1000 * FIRST.async_hours * 3600 / FIRST.steps / (GROUPS * SAMPLES) - PROMPT
"""Tokens of an answer: tokens a second × seconds of a step, shared out over the answers of a step, less the prompt."""

START = Constants(mean=MEAN, train_flops_share=0.3, decode_overhead=0.012)
SCALING = (64, 128, 256, 512)
HUGE = (1024, 2048, 4096)


@dataclass(frozen=True)
class Effort:
    """`scale`: see `_cluster`. Steps counted of a synchronous and of an asynchronous run."""

    scale: int
    sync: int
    asynchronous: int


def measure(row: Published, constants: Constants, effort: Effort, gpus: int | None = None, **changes: Any) -> Any:
    """The asynchronous system, in its steady state; `changes` with `__` for the dot."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    settings = cluster(row, constants, gpus=gpus, changes=dotted)
    eta = settings.control.max_staleness
    synchronous = eta == 0
    warmup = 1 if synchronous else min(eta, 10) + 3
    return on_slice(settings, effort.scale, warmup, effort.sync if synchronous else effort.asynchronous)


def fit(effort: Effort, rounds: int) -> Constants:
    """Both constants, turn about: each changes its side's time in proportion, or by so much a step."""
    constants = START
    step = {"sync": FIRST.sync_hours * 3600 / FIRST.steps, "async": FIRST.async_hours * 3600 / FIRST.steps}
    for _ in range(rounds):
        found = measure(FIRST, constants, effort)
        share = constants.train_flops_share * found.step_seconds / step["async"]
        constants = Constants(MEAN, share, constants.decode_overhead)
        found = measure(FIRST, constants, effort, **dotted(SYNCHRONOUS))
        # As many decode steps as the longest answer has tokens: one is cut off in every batch.
        overhead = constants.decode_overhead + (step["sync"] - found.step_seconds) / LONGEST
        constants = Constants(MEAN, share, max(overhead, 0.0))
    return constants


def dotted(changes: Mapping[str, object]) -> dict[str, Any]:
    return {name.replace(".", "__"): value for name, value in changes.items()}


def table(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """The paper's table: hours of both systems, and what one is of the other."""
    rows = []
    for row in PUBLISHED:
        sync = measure(row, constants, effort, **dotted(SYNCHRONOUS))
        asynchronous = measure(row, constants, effort)
        predicted = sync.hours / asynchronous.hours
        rows.append(
            {
                "what": "table",
                "case": row.name,
                "sync_hours": sync.hours,
                "sync_paper": row.sync_hours,
                "async_hours": asynchronous.hours,
                "async_paper": row.async_hours,
                "predicted": predicted,
                "paper": row.speedup,
                "error": predicted / row.speedup - 1,
                "fitted": row is FIRST,
                "trainer_waits": asynchronous.trainer["wait"],
                "running": asynchronous.running,
            }
        )
        show(rows[-1])
    return rows


def own_utilisation(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """The other rows with one more constant each, fitted on the asynchronous hours: is it only the trainer?"""
    rows = []
    for row in PUBLISHED[1:]:
        own = constants
        for _ in range(2):
            share = own.train_flops_share * measure(row, own, effort).hours / row.async_hours
            own = Constants(constants.mean, min(share, 1.0), constants.decode_overhead)
        sync = measure(row, own, effort, **dotted(SYNCHRONOUS))
        asynchronous = measure(row, own, effort)
        predicted = sync.hours / asynchronous.hours
        rows.append(
            {
                "what": "own utilisation",
                "case": row.name,
                "sync_hours": sync.hours,
                "sync_paper": row.sync_hours,
                "async_hours": asynchronous.hours,
                "async_paper": row.async_hours,
                "predicted": predicted,
                "paper": row.speedup,
                "error": predicted / row.speedup - 1,
                "fitted": True,
                "train_flops_share": own.train_flops_share,
                "trainer_waits": asynchronous.trainer["wait"],
            }
        )
        show(rows[-1])
    return rows


def curve(constants: Constants, effort: Effort, etas: Sequence[int]) -> list[dict[str, Any]]:
    """Throughput of the first row against η."""
    rows = []
    for eta in etas:
        found = measure(FIRST, constants, effort, control__max_staleness=eta)
        predicted = found.trained_tokens_per_second / 1000
        rows.append(
            {
                "what": "eta",
                "case": "∞" if eta == UNBOUNDED else str(eta),
                "predicted": predicted,
                "paper": ETAS[eta],
                "error": predicted / ETAS[eta] - 1,
                "fitted": eta == FIRST.eta,
                "trainer_waits": found.trainer["wait"],
                "running": found.running,
                "staleness_mean": found.staleness_mean,
            }
        )
        show(rows[-1])
    return rows


def interruption(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """Generated tokens a second on 4 nodes, where nothing but new weights holds generation up, with and without."""
    rows = []
    small = Effort(min(effort.scale, 8), effort.sync, max(4, effort.asynchronous // 2))
    for row in PUBLISHED[:2]:
        runs = {
            kind: measure(
                row,
                constants,
                small,
                gpus=4 * NODE,
                control__max_staleness=UNBOUNDED,
                rollout__interrupt=kind,
            )
            for kind in ("recompute", "finish")
        }
        gain = runs["recompute"].generated_tokens_per_second / runs["finish"].generated_tokens_per_second - 1
        paper = INTERRUPTION[row.model]
        rows.append(
            {
                "what": "interruption",
                "case": row.name,
                "predicted": gain,
                "paper": paper,
                "error": (1 + gain) / (1 + paper) - 1,
                "fitted": False,
            }
        )
        show(rows[-1])
    return rows


def scaling(constants: Constants, effort: Effort, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Throughput of the first model against the number of devices, the batch being the same."""
    rows: list[dict[str, Any]] = []
    for gpus in sizes:
        found = measure(FIRST, constants, effort, gpus=gpus)
        sync = measure(FIRST, constants, effort, gpus=gpus, **dotted(SYNCHRONOUS))
        rows.append(
            {
                "what": "scaling",
                "case": f"{gpus} GPUs",
                "predicted": found.trained_tokens_per_second / 1000,
                "sync_tokens": sync.trained_tokens_per_second / 1000,
                "trainer_waits": found.trainer["wait"],
                "running": found.running,
                "staleness_mean": found.staleness_mean,
                "step_seconds": found.step_seconds,
                "group_seconds": found.group_seconds,
                "fitted": False,
            }
        )
        first = rows[0]
        rows[-1]["of_linear"] = found.trained_tokens_per_second / 1000 / first["predicted"] * sizes[0] / gpus
        show(rows[-1])
    return rows


def show(row: Mapping[str, Any]) -> None:
    """As it comes."""
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, file=sys.stderr, flush=True)


def low_staleness(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """The other way round: the overhead of a decode step fitted on η = 0 in place of the synchronous row. What does
    that say of η = 1 and 2, and of the synchronous system?"""
    for _ in range(2):
        found = measure(FIRST, constants, effort, control__max_staleness=0)
        seconds = FIRST.async_hours * 3600 / FIRST.steps * ETAS[FIRST.eta] / ETAS[0]
        overhead = constants.decode_overhead + (seconds - found.step_seconds) / LONGEST
        constants = Constants(MEAN, constants.train_flops_share, max(overhead, 0.0))
    rows = curve(constants, effort, (0, 1, 2))
    sync = measure(FIRST, constants, effort, **dotted(SYNCHRONOUS))
    for row in rows:
        row |= {"what": "fitted on η = 0", "fitted": True, "decode_overhead": constants.decode_overhead}
        row |= {"sync_hours": sync.hours, "sync_paper": FIRST.sync_hours}
    return rows


def whole_curve(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """At every published η."""
    return curve(constants, effort, tuple(ETAS))


def whole_scaling(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """Where the paper has it, and beyond."""
    return scaling(constants, effort, SCALING + HUGE)


PARTS = {
    "table": table,
    "eta": whole_curve,
    "own utilisation": own_utilisation,
    "fitted on η = 0": low_staleness,
    "interruption": interruption,
    "scaling": whole_scaling,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="few steps of the table and of three points of η (a minute)"
    )
    parser.add_argument("--scale", type=int, default=8, help="the part of the cluster that is simulated: 1/SCALE")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="do this part anew, with the constants and the rest as they are"
    )
    parser.add_argument("--jobs", type=int, default=2, help="parts at a time, a core each")
    args = parser.parse_args()
    effort = Effort(args.scale, sync=4, asynchronous=12)
    rows: list[dict[str, Any]] = []
    if args.quick:
        effort = Effort(8, sync=1, asynchronous=3)
        constants = fit(effort, rounds=1)
        rows = table(constants, effort) + curve(constants, effort, (0, 2, 8))
    else:
        if args.only:
            known = json.loads((RESULTS / "paper.json").read_text())
            constants = Constants(**known["headline"]["constants"])
            rows = [row for row in known["rows"] if row["what"] not in args.only]
        else:
            constants = fit(effort, rounds=3)
            print(constants, file=sys.stderr, flush=True)
        with ProcessPoolExecutor(args.jobs) as pool:
            parts = [pool.submit(PARTS[name], constants, effort) for name in args.only or PARTS]
            rows += [row for part in parts for row in part.result()]
        rows.sort(key=lambda row: list(PARTS).index(row["what"]))
        from _paper_docs import write_docs

        write_docs(DOCS, constants, rows)
    errors = [abs(r["error"]) for r in rows if "error" in r and not r["fitted"]]
    headline = {
        "speedup": {r["case"]: round(r["predicted"], 2) for r in rows if r["what"] == "table"},
        "speedup_paper": {r["case"]: round(r["paper"], 2) for r in rows if r["what"] == "table"},
        "worst_error": max(errors),
        "within_15_percent": sum(e <= 0.15 for e in errors),
        "predictions": len(errors),
        "constants": asdict(constants),
    }
    report("paper", headline, rows)


if __name__ == "__main__":
    main()
