"""The simulator against the published figures of the asynchronous system that Fleuve is built after.

    python benchmarks/paper.py [--quick] [--scale 8] [--only PART]

Five constants are fitted, each on one figure of the paper (`fit`); the mean length of a maths answer is not, but
follows from two of them: what a step of the first row takes, times the tokens a second at its η. All else is predicted:
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
from dataclasses import asdict, dataclass, replace
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
    thinnest,
)
from _report import RESULTS, report

from fleuve.simulate.model_shape import load_model_shape

DOCS = Path(__file__).parent.parent / "docs"
FIRST = PUBLISHED[0]
MEAN = ETAS[FIRST.eta] * 1000 * FIRST.async_hours * 3600 / FIRST.steps / (GROUPS * SAMPLES) - PROMPT
"""Tokens of an answer: tokens a second × seconds of a step, shared out over the answers of a step, less the prompt."""

START = Constants(
    mean=MEAN,
    code_mean=12_000,
    decode_overhead=0.008,
    switch_seconds=80,
    train_flops_share=0.5,
    train_half_width=1_100,
)
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
    scale = min(effort.scale, thinnest(settings))
    return on_slice(settings, scale, warmup, effort.sync if synchronous else effort.asynchronous)


def fit(effort: Effort, rounds: int) -> Constants:
    """Each constant on one figure, turn about, as each changes its figure in proportion or by so much a step."""
    constants, (first, second) = START, PUBLISHED[:2]
    for _ in range(rounds):
        constants = fit_utilisation(constants, effort, first, second)
        constants = fit_overhead(constants, effort)
        found = measure(first, constants, effort, **dotted(SYNCHRONOUS))
        switch = constants.switch_seconds + (first.sync_step - found.step_seconds) / 2
        constants = replace(constants, switch_seconds=max(switch, 0.0))
    return fit_code(constants, effort, PUBLISHED[2], rounds)


def fit_utilisation(constants: Constants, effort: Effort, first: Published, second: Published) -> Constants:
    """Two widths, each with the utilisation that gives its row's asynchronous hours, say what the curve is. (The
    trainer is the slower side in both.)"""
    widths, reached = [], []
    for row in (first, second):
        width = load_model_shape(row.model).hidden
        share = constants.train_flops_share * width / (width + constants.train_half_width)
        widths.append(width)
        reached.append(share * measure(row, constants, effort).step_seconds / row.async_step)
    (w, v), (a, b) = widths, reached
    half = w * v * (b - a) / (a * v - b * w)
    return replace(constants, train_half_width=half, train_flops_share=a * (w + half) / w)


def fit_overhead(constants: Constants, effort: Effort) -> Constants:
    """On η = 0, where engines and trainer work in turn but on devices of their own."""
    found = measure(FIRST, constants, effort, control__max_staleness=0)
    seconds = FIRST.async_step * ETAS[FIRST.eta] / ETAS[0]
    # As many decode steps as the longest answer has tokens: one is cut off in every batch.
    overhead = constants.decode_overhead + (seconds - found.step_seconds) / LONGEST
    return replace(constants, decode_overhead=max(overhead, 0.0))


def fit_code(constants: Constants, effort: Effort, row: Published, rounds: int) -> Constants:
    """How long the answers of code are, on the asynchronous hours of `row`: a step grows somewhat more than they."""
    for _ in range(rounds):
        found = measure(row, constants, effort)
        mean = constants.code_mean * (row.async_step / found.step_seconds) ** 0.75
        constants = replace(constants, code_mean=min(mean, 0.7 * LONGEST))
    return constants


def dotted(changes: Mapping[str, object]) -> dict[str, Any]:
    return {name.replace(".", "__"): value for name, value in changes.items()}


def table(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """The paper's table: hours of both systems, and what one is of the other."""
    return [compared("table", row, constants, effort) for row in PUBLISHED]


def compared(what: str, row: Published, constants: Constants, effort: Effort) -> dict[str, Any]:
    """One row of it. Without changing over, the synchronous system is compared with another's hours too."""
    sync = measure(row, constants, effort, **dotted(SYNCHRONOUS))
    asynchronous = measure(row, constants, effort)
    predicted = sync.hours / asynchronous.hours
    found = {
        "what": what,
        "case": row.name,
        "sync_hours": sync.hours,
        "sync_paper": row.sync_hours,
        "sync_error": sync.hours / row.sync_hours - 1,
        "async_hours": asynchronous.hours,
        "async_paper": row.async_hours,
        "async_error": asynchronous.hours / row.async_hours - 1,
        "async_fitted": row is not PUBLISHED[3],
        "predicted": predicted,
        "paper": row.speedup,
        "error": predicted / row.speedup - 1,
        "fitted": row.name == FIRST.name,
        "sync_without_switch": sync.hours - 2 * constants.switch_seconds * row.steps / 3600,
        "other_paper": row.other_hours,
        "trainer_waits": asynchronous.trainer["wait"],
        "running": asynchronous.running,
        "tensor_parallel": row.tensor_parallel,
        "trainer_parallel": row.trainer_parallel,
        "code_mean": constants.code_mean,
    }
    show(found)
    return found


def two_constants(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """What the fewest constants give, both fitted on the first row: the trainer's utilisation, the same for all
    models, and the overhead of a decode step, on the synchronous hours. Code is as long as maths."""
    width = load_model_shape(FIRST.model).hidden
    share = constants.train_flops_share * width / (width + constants.train_half_width)
    few = replace(constants, code_mean=MEAN, switch_seconds=0, train_flops_share=share, train_half_width=0)
    for _ in range(2):
        found = measure(FIRST, few, effort, **dotted(SYNCHRONOUS))
        overhead = few.decode_overhead + (FIRST.sync_step - found.step_seconds) / LONGEST
        few = replace(few, decode_overhead=overhead)
    rows = [compared("two constants", row, few, effort) for row in PUBLISHED]
    return [row | {"fitted": True, "decode_overhead": few.decode_overhead} for row in rows]


def other_splits(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """Models split otherwise than `Published` says; utilisations and the length of code are fitted anew."""
    found = []
    for name, changes in {
        "engines of twice as many devices": {"tensor_parallel": 2.0},
        "ranks of half as many devices": {"trainer_parallel": 0.5},
    }.items():
        rows = [
            replace(row, **{key: max(1, int(getattr(row, key) * times)) for key, times in changes.items()})
            for row in PUBLISHED
        ]
        own = fit_code(fit_utilisation(constants, effort, PUBLISHED[0], rows[1]), effort, rows[2], 2)
        found += [compared("split", row, own, effort) | {"split": name, "fitted": True} for row in rows[1:]]
    return found


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
                "fitted": eta in (0, FIRST.eta),
                "trainer_waits": found.trainer["wait"],
                "running": found.running,
                "staleness_mean": found.staleness_mean,
            }
        )
        show(rows[-1])
    return rows


def interruption(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """Generated tokens a second on 4 nodes, where nothing but new weights holds generation up: with interruption, and
    without. Then either all engines wait for the longest answer (the paper: "the controller must wait for the longest
    response"), or each for its own, as Fleuve's do."""
    rows = []
    small = Effort(min(effort.scale, 4), effort.sync, max(4, effort.asynchronous // 2))
    without: dict[str, Any] = {"rollout__interrupt": "finish"}
    kinds = {"with": {}, "together": without | {"simulate__finish_together": True}, "each": without}
    for row in PUBLISHED[:2]:
        speed = {
            kind: measure(
                row, constants, small, gpus=4 * NODE, control__max_staleness=UNBOUNDED, **changes
            ).generated_tokens_per_second
            for kind, changes in kinds.items()
        }
        gain, paper = speed["with"] / speed["together"] - 1, INTERRUPTION[row.model]
        rows.append(
            {
                "what": "interruption",
                "case": row.name,
                "predicted": gain,
                "each_on_its_own": speed["with"] / speed["each"] - 1,
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


def whole_curve(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """At every published η."""
    return curve(constants, effort, tuple(ETAS))


def whole_scaling(constants: Constants, effort: Effort) -> list[dict[str, Any]]:
    """Where the paper has it, and beyond."""
    return scaling(constants, effort, SCALING + HUGE)


PARTS = {
    "table": table,
    "eta": whole_curve,
    "two constants": two_constants,
    "split": other_splits,
    "interruption": interruption,
    "scaling": whole_scaling,
}


def headline(constants: Constants, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What one would quote."""
    errors = [abs(r["error"]) for r in rows if "error" in r and not r["fitted"]]
    hours = [abs(r["sync_error"]) for r in rows if r["what"] == "table" and not r["fitted"]]
    hours += [abs(r["async_error"]) for r in rows if r["what"] == "table" and not r["async_fitted"]]
    return {
        "speedup": {r["case"]: round(r["predicted"], 2) for r in rows if r["what"] == "table"},
        "speedup_paper": {r["case"]: round(r["paper"], 2) for r in rows if r["what"] == "table"},
        "worst_error": max(errors),
        "within_15_percent": sum(e <= 0.15 for e in errors),
        "predictions": len(errors),
        "worst_error_of_hours": max(hours),
        "constants": asdict(constants),
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
            constants = fit(effort, rounds=2)
            print(constants, file=sys.stderr, flush=True)
        with ProcessPoolExecutor(args.jobs) as pool:
            parts = [pool.submit(PARTS[name], constants, effort) for name in args.only or PARTS]
            rows += [row for part in parts for row in part.result()]
        rows.sort(key=lambda row: list(PARTS).index(row["what"]))
    report("paper", headline(constants, rows), rows)
    if not args.quick:
        from _paper_docs import write_docs

        write_docs(DOCS, constants, rows)


if __name__ == "__main__":
    main()
