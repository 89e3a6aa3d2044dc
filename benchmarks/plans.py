"""Beyond the paper: the plan that `fleuve plan` would choose for its four runs, against its split of 75 to 25.

    python benchmarks/plans.py [--quick]

Constants are those that `benchmarks/paper.py` fitted (its committed result). For each run the search of `fleuve plan`
(all splits, sizes of engines and ranks, token budgets, activations kept or recomputed, within memory) proposes the
layouts that look fastest; the best of them and the paper's are simulated under the same bound on staleness, on the
thinnest slice of the cluster that divides evenly. The last row is the first model on 4,096 devices. The table goes into
`docs/simulator.md`, between its markers. All of it takes some five minutes of a core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _cluster import LONGEST, PROMPT, PUBLISHED, Constants, Published, cluster, on_slice, thinnest
from _report import RESULTS, report

from fleuve.config.settings import Settings
from fleuve.simulate.estimate import work_of
from fleuve.simulate.result import SimulationResult
from fleuve.simulate.screen import Screened, fitting, screen

DOCS = Path(__file__).parents[1] / "docs" / "simulator.md"
BEGIN, END = "<!-- plans: begin -->", "<!-- plans: end -->"
HUGE = replace(PUBLISHED[0], name="1.5B maths, 4,096 devices", nodes=512)


def run(settings: Settings, counted: int) -> SimulationResult:
    """The steady state."""
    return on_slice(settings, thinnest(settings), min(settings.control.max_staleness, 16) + 3, counted)


def proposed(settings: Settings, count: int) -> list[Screened]:
    """The layouts that arithmetic likes best, of those that fit."""
    fit, problem = fitting(settings, settings.control.max_staleness)
    assert problem is None, problem
    return screen([c for c in fit if c[0].rollout_gpus is not None], work_of(settings), count)


def compare(row: Published, constants: Constants, layouts: int, counted: int) -> dict[str, Any]:
    """The paper's split and the plan's."""
    # Nothing waits here for a group at its deadline, in either: the bound is on admission, as in the paper.
    base = cluster(row, constants)
    paper = run(base, counted)
    best, found = None, None
    for screened in proposed(base, layouts):
        result = run(screened.settings, counted)
        if found is None or result.step_seconds < found.step_seconds:
            best, found = screened, result
    assert best is not None
    assert found is not None
    candidate = best.candidate
    return {
        "run": row.name,
        "hours_75_25": paper.hours,
        "waits_75_25": paper.trainer["wait"],
        "hours_plan": found.hours,
        "waits_plan": found.trainer["wait"],
        "faster": paper.hours / found.hours,
        "rollout_share": (candidate.rollout_gpus or 0) / (base.simulate.gpus or 1),
        "tensor": candidate.tensor_parallel,
        "trainer_parallel": candidate.trainer_parallel,
        "token_budget": candidate.token_budget // (LONGEST + PROMPT),
        "recompute_activations": candidate.recompute_activations,
        "tokens_per_second_plan": found.trained_tokens_per_second,
        "tokens_per_second_75_25": paper.trained_tokens_per_second,
        "step_75_25": paper.step_seconds,
        "step_plan": found.step_seconds,
        "running_75_25": paper.running,
        "running_plan": found.running,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For the documentation."""
    lines = [
        "| run | 75 to 25, h | plan, h | times as fast | rollout | engines, ranks of | token budget, activations | "
        "trainer waits: 75 to 25, plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['run']} | {r['hours_75_25']:#.3g} | {r['hours_plan']:#.3g} | **{r['faster']:.2f}** | "
            f"{r['rollout_share']:.0%} | {r['tensor']}, {r['trainer_parallel']} | {r['token_budget']} × longest, "
            f"{'recomputed' if r['recompute_activations'] else 'kept'} | "
            f"{r['waits_75_25']:.0%}, {r['waits_plan']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first run only, few steps (a minute)")
    args = parser.parse_args()
    fitted = json.loads((RESULTS / "paper.json").read_text())["headline"]["constants"]
    constants = Constants(**fitted)
    rows = []
    for row in PUBLISHED[:1] if args.quick else (*PUBLISHED, HUGE):
        rows.append(compare(row, constants, layouts=1 if args.quick else 2, counted=4 if args.quick else 12))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, file=sys.stderr, flush=True)
    if not args.quick:
        before, rest = DOCS.read_text(encoding="utf-8").split(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    report("plans", {"faster": {r["run"]: round(r["faster"], 2) for r in rows}}, rows)


if __name__ == "__main__":
    main()
