"""What staleness costs: naive PPO against the decoupled objective, for every bound η.

    python benchmarks/staleness.py [--quick] [--jobs 2] [--seeds 3]

The paper's ablation, on the small model. Each run trains the quickstart's model on the quickstart's data by `SETTING`,
and its last version and `LATEST` before it are evaluated on 256 problems that training never sees, two answers each:
the solved rate is the mean over these versions, since a single one is a few hundredths off its neighbours. Rollout is
`RATIO` times as fast as training, so the buffer is full and what is trained is about as stale as η allows; the table
says how stale. Time is virtual (`_virtual_run.py`): the figures do not depend on how busy the machine is, and the same
command gives the same ones again.

Finished runs are kept in `--runs`, a line each: an interrupted ablation goes on where it was. At the end are written
`benchmarks/results/staleness.json`, the tables between the markers of `docs/staleness.md`, and `docs/staleness.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch comes: a process has one thread, also the workers

from _report import report

from fleuve.config.loader import load_settings
from fleuve.config.settings import Settings

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples" / "quickstart.toml"
DOCS = ROOT / "docs"
SETTING = ["--control.batch_size=24", "--trainer.minibatches=2", "--trainer.learning_rate=1e-4"]
STEPS, PROBLEMS, SAMPLES = 60, 256, 2
LATEST = (16, 12, 8, 4, 0)
"""How many steps before the last the evaluated versions lie."""

RATIO = 2.0
"""Training a batch takes this many times as long as a full engine takes to generate it."""
CLIP = 0.05
"""ε, below and above: tight, but no synchronous run feels it, since a step moves few tokens by more."""

UNBOUNDED = 1_000_000
ETAS = (0, 1, 2, 4, 8, 16, UNBOUNDED)
METHODS = {"decoupled": "recompute", "naive": "behaviour"}
PROXIMAL = {**METHODS, "interpolated": "interpolate"}
CURVES = ("reward/solved", "loss/entropy", "loss/clip_fraction", "loss/effective_sample_size", "response/length_mean")


@dataclass(frozen=True)
class Arm:
    """One line of the table."""

    eta: int
    method: str = "decoupled"
    overdue: str = "wait"
    interrupt: str = "recompute"
    ratio: float = RATIO
    clip: float = CLIP

    def flags(self) -> list[str]:
        """On top of the quickstart and `SETTING`."""
        values = {
            "control.max_staleness": self.eta,
            "control.overdue": self.overdue,
            "rollout.interrupt": self.interrupt,
            "algorithm.proximal": PROXIMAL[self.method],
            "algorithm.clip_low": self.clip,
            "algorithm.clip_high": self.clip,
        }
        return [*SETTING, *(f"--{key}={value}" for key, value in values.items())]


MAIN = [Arm(eta, method) for eta in ETAS for method in METHODS]
INTERPOLATED = [Arm(8, "interpolated")]
WIDER = [Arm(8, method, clip=0.2) for method in METHODS]
# Where rollout is no faster than training, long answers meet several versions and their deadlines.
OVERDUE = [Arm(2, overdue=policy, ratio=1.0) for policy in ("wait", "mask", "train", "drop")]
INTERRUPT = [Arm(2, interrupt=mode, ratio=1.0) for mode in ("recompute", "keep", "finish")]


@dataclass(frozen=True)
class Job:
    """One run. Everything that its result depends on, but the code."""

    arm: Arm
    seed: int
    steps: int
    problems: int
    samples: int

    def settings(self) -> Settings:
        """The quickstart's, with this run's flags."""
        return load_settings(CONFIG, [*self.arm.flags(), f"--seed={self.seed}", f"--steps={self.steps}"])

    def versions(self) -> list[int]:
        """Those that are evaluated."""
        return [self.steps - back for back in LATEST if back < self.steps]

    def key(self) -> str:
        """The same for the same run."""
        settings = self.settings().model_dump(mode="json")
        return json.dumps([settings, self.arm.ratio, self.versions(), self.problems, self.samples], sort_keys=True)


def work(job: Job) -> dict[str, Any]:
    """Carry out a run, in a process of its own."""
    from _virtual_run import Costs, run

    result = run(
        job.settings(),
        Costs(training_ratio=job.arm.ratio),
        evaluated=job.versions(),
        problems=job.problems,
        samples=job.samples,
    )
    steps, evaluations = result.steps, result.evaluations
    mean, largest = steps.realised()
    return {
        "solved": statistics.fmean(e.accuracy or 0.0 for e in evaluations.values()),
        "solved_by_version": {version: e.accuracy for version, e in evaluations.items()},
        "length": statistics.fmean(e.length_mean for e in evaluations.values()),
        "staleness_mean": mean,
        "staleness_max": largest,
        "mixed": sum(m["rollout/interrupted"] for m in steps.metrics) / steps.answers,
        "overdue": sum(m["staleness/overdue_fraction"] for m in steps.metrics) / len(steps.metrics),
        "dropped": steps.metrics[-1]["groups/dropped"],
        "virtual_seconds": result.virtual_seconds,
        "cpu_seconds": result.cpu_seconds,
        "curves": {name: [round(m.get(name, float("nan")), 5) for m in steps.metrics] for name in CURVES},
    }


def carry_out(jobs: Sequence[Job], kept: Path, processes: int) -> list[dict[str, Any]]:
    """The results of `jobs`, in order; those that `kept` holds already are not run again."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = dict(_read(kept))
    todo = {job.key(): job for job in jobs if job.key() not in done}
    print(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them done before (in {kept})", file=sys.stderr)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool, kept.open("a") as file:
        running = {pool.submit(work, job): key for key, job in todo.items()}
        for number, future in enumerate(as_completed(running), start=1):
            key = running[future]
            done[key] = future.result()
            file.write(json.dumps({"key": key, "result": done[key]}) + "\n")
            file.flush()
            arm, seed = todo[key].arm, todo[key].seed
            print(f"{number}/{len(todo)}  {_name(arm)}, seed {seed}: {done[key]['solved']:.3f}", file=sys.stderr)
    return [done[job.key()] for job in jobs]


def _read(kept: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in kept.read_text().splitlines() if kept.exists() else []:
        try:
            found = json.loads(line)
        except json.JSONDecodeError:  # cut off when the ablation was interrupted
            continue
        yield found["key"], found["result"]


def _name(arm: Arm) -> str:
    eta = "unbounded" if arm.eta == UNBOUNDED else str(arm.eta)
    return f"eta {eta}, {arm.method}, overdue {arm.overdue}, interrupt {arm.interrupt}, clip {arm.clip}"


def row(arm: Arm, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A line of the table: means over the seeds, and the smallest and largest solved rate."""
    solved = [float(r["solved"]) for r in results]

    def mean(name: str) -> float:
        return statistics.fmean(float(r[name]) for r in results)

    return {
        **dataclasses.asdict(arm),
        "eta": "unbounded" if arm.eta == UNBOUNDED else arm.eta,
        "seeds": len(results),
        "solved": statistics.fmean(solved),
        "solved_min": min(solved),
        "solved_max": max(solved),
        "staleness_mean": mean("staleness_mean"),
        "staleness_max": max(int(r["staleness_max"]) for r in results),
        "mixed": mean("mixed"),
        "overdue_tokens": mean("overdue"),
        "dropped_groups": mean("dropped"),
        "length": mean("length"),
        "virtual_seconds": mean("virtual_seconds"),
        "cpu_seconds": mean("cpu_seconds"),
    }


def headline(by_arm: Mapping[Arm, Mapping[str, Any]], initial: float) -> dict[str, Any]:
    """The final solved rates that one would quote, each the mean over the seeds, with smallest and largest."""
    quoted = {
        "eta0": Arm(0),
        "eta0_naive": Arm(0, "naive"),
        "eta8_decoupled": Arm(8),
        "eta8_naive": Arm(8, "naive"),
    }
    rows = {name: by_arm[arm] for name, arm in quoted.items() if arm in by_arm}
    values: dict[str, Any] = {name: r["solved"] for name, r in rows.items()}
    for name, r in rows.items():
        values[f"{name}_spread"] = [r["solved_min"], r["solved_max"]]
        values[f"{name}_staleness"] = {"mean": r["staleness_mean"], "max": r["staleness_max"]}
    return {**values, "initial": initial}


# --- docs -----------------------------------------------------------------------------------------------------------


def markdown(by_arm: Mapping[Arm, Mapping[str, Any]], initial: float) -> str:
    """The tables for the docs. Solved rates are means over the seeds, smallest and largest in brackets."""
    lines = [f"Solved by the initial model: {initial:.3f}.", ""]
    lines += ["| η | realised staleness, mean (max) | decoupled | naive |", "|---|---|---|---|"]
    for eta in ETAS:
        pair = [by_arm[Arm(eta, method)] for method in METHODS]
        lines.append(f"| {pair[0]['eta']} | {_staleness(pair[0])} | {' | '.join(map(_solved, pair))} |")
    lines += ["", f"`proximal = interpolate` at η = 8: {_solved(by_arm[INTERPOLATED[0]])}."]
    lines += ["", "| clip (η = 8) | decoupled | naive |", "|---|---|---|"]
    for clip in sorted({arm.clip for arm in by_arm}):
        lines.append(f"| {clip:g} | {' | '.join(_solved(by_arm[Arm(8, method, clip=clip)]) for method in METHODS)} |")
    for name, arms in (("overdue", OVERDUE), ("interrupt", INTERRUPT)):
        lines += [
            "",
            f"| `{name}` (η = {arms[0].eta}, decoupled, rollout as fast as training) | solved | staleness, mean (max) "
            "| answers of several versions | overdue tokens | groups dropped | virtual seconds |",
            "|---|---|---|---|---|---|---|",
        ]
        for arm in arms:
            r = by_arm[arm]
            lines.append(
                f"| `{r[name]}` | {_solved(r)} | {_staleness(r)} | {r['mixed']:.1%} "
                f"| {r['overdue_tokens']:.1%} | {r['dropped_groups']:.0f} | {r['virtual_seconds']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def _solved(row: Mapping[str, Any]) -> str:
    return f"{row['solved']:.3f} ({row['solved_min']:.3f} to {row['solved_max']:.3f})"


def _staleness(row: Mapping[str, Any]) -> str:
    return f"{row['staleness_mean']:.1f} ({row['staleness_max']})"


def between_markers(document: str, text: str) -> str:
    """`document` with `text` between its markers, or at its end, in new ones."""
    begin, end = "<!-- benchmarks/staleness.py writes from here -->", "<!-- to here -->"
    before, found, rest = document.partition(begin)
    if not found:
        return f"{document.rstrip()}\n\n{begin}\n{text}{end}\n"
    return f"{before}{begin}\n{text}{end}{rest.partition(end)[2]}"


def plot(path: Path, by_arm: Mapping[Arm, Mapping[str, Any]], curves: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Left: final solved rate over η. Right: the training batches' solved rate at η = 8, step by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for method, colour in zip(METHODS, ("tab:blue", "tab:red"), strict=True):
        part = [by_arm[Arm(eta, method)] for eta in ETAS]
        error = [[r["solved"] - r["solved_min"] for r in part], [r["solved_max"] - r["solved"] for r in part]]
        y = [r["solved"] for r in part]
        left.errorbar(range(len(ETAS)), y, yerr=error, marker="o", capsize=3, color=colour, label=method)
    left.set(xlabel="η, the bound on staleness", ylabel="solved, held-out problems, last versions", ylim=(0, 1))
    left.set_xticks(range(len(ETAS)), [str(by_arm[Arm(eta)]["eta"]) for eta in ETAS])
    left.legend()
    for (name, runs), colour in zip(curves.items(), ("tab:gray", "tab:blue", "tab:red"), strict=False):
        steps = range(1, len(runs[0]) + 1)
        right.plot(steps, [statistics.fmean(values) for values in zip(*runs, strict=True)], color=colour, label=name)
    right.set(xlabel="step", ylabel="solved, training batches, mean of the seeds", ylim=(0, 1))
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --- all of it ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of three arms; writes no docs (a minute)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time, a core each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", action="store_true", help="the headline's three arms; writes no docs")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "staleness.jsonl", help="where results are kept")
    args = parser.parse_args()
    arms = list(dict.fromkeys([*MAIN, *INTERPOLATED, *WIDER, *OVERDUE, *INTERRUPT]))
    job = Job(arms[0], 0, args.steps or STEPS, PROBLEMS, SAMPLES)
    seeds = args.seeds
    if args.only:
        arms = [Arm(0), Arm(8), Arm(8, "naive")]
    if args.quick:
        arms = [Arm(0), Arm(8), Arm(8, "naive")]
        job = dataclasses.replace(job, steps=args.steps or 4, problems=32, samples=1)
        seeds = 1
    # The ablation itself first, seed by seed. The setting was looked for with seed 0.
    jobs = [dataclasses.replace(job, arm=arm, seed=seed) for seed in range(1, seeds + 1) for arm in arms]
    jobs.sort(key=lambda job: job.arm not in MAIN)
    results = carry_out(jobs, args.runs, args.jobs)
    runs = {arm: [r for j, r in zip(jobs, results, strict=True) if j.arm == arm] for arm in arms}
    by_arm = {arm: row(arm, found) for arm, found in runs.items()}

    from _virtual_run import evaluate_initial

    initial = evaluate_initial(job.settings(), problems=job.problems, samples=job.samples).accuracy
    assert initial is not None
    if not args.quick and not args.only:
        document = DOCS / "staleness.md"
        text = document.read_text() if document.exists() else "# What staleness costs\n"
        document.write_text(between_markers(text, markdown(by_arm, initial)))
        shown = {"η = 0": Arm(0), "η = 8, decoupled": Arm(8), "η = 8, naive": Arm(8, "naive")}
        curves = {name: [r["curves"]["reward/solved"] for r in runs[arm]] for name, arm in shown.items()}
        plot(DOCS / "staleness.png", by_arm, curves)
    report("staleness", headline(by_arm, initial), list(by_arm.values()))


if __name__ == "__main__":
    main()
