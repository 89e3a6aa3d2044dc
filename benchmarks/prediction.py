"""The simulator against this machine: what it predicts of `async_vs_sync.py`'s systems, and what they do.

    python benchmarks/prediction.py [--quick] [--config examples/quickstart.toml]

Calibrated on one short asynchronous run: from it come answer lengths, what is learnt from, verdicts, and the times of
the trainer and of the weights' way. It has another seed than the runs that are predicted, so neither their prompts nor
their answers. What it cannot know of another placement is measured apart, on the parts themselves: the engine's steps
at each number of threads; the run's batches, trained again at each other number; and what an engine loses over one
answer beside its tokens (`per_answer`). On cores of its own that is request and reply, measured on an engine that is
asked for one token at a time. Colocated, it is all that the controller and the verifier do as well, for they take their
time from the engines' cores: the wait for batches of answers of one token, in a run of that placement. None of the
predicted runs is used. They are made afterwards, turn about.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _measure import engine_steps, request_seconds, trainer_times
from _report import report, spread
from async_vs_sync import SYSTEMS, run, train
from calibrate import answers, times

from fleuve.config.loader import load_settings
from fleuve.config.settings import Settings
from fleuve.launch.placement import Placement, available_cpus, place
from fleuve.simulate.calibrate import FIRST_STEPS, fit_engine, fit_trainer
from fleuve.simulate.run import simulate

(ASYNC,) = [name for name in SYSTEMS if name.startswith("async")]
QUICK = [name for name in SYSTEMS if name.endswith("a core") or name == ASYNC]
SIMULATED, SIMULATED_QUICK = 100, 40
SEEDS = range(3)
CALIBRATION = ["--seed", "1"]
ONE_TOKEN = ["--control.max_staleness", "0", "--rollout.max_new_tokens", "1"]
"""One batch at a time of answers of one token: what the trainer waits for is all that they cost beside their tokens."""

FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "seconds_per_step": ("seconds a step", "{:.2f}".format),
    "tokens_per_second": ("trained tokens a second", "{:,.0f}".format),
    "staleness_mean": ("staleness, mean", "{:.2f}".format),
    "wait_share": ("trainer waits", "{:.0%}".format),
}
DOCS = Path(__file__).parents[1] / "docs" / "simulator.md"
BEGIN, END = "<!-- prediction: begin -->", "<!-- prediction: end -->"


class Calibration:
    """What was measured of this machine, and for which placement it holds."""

    def __init__(self, config: str, source: Path, quick: bool) -> None:
        self.config = config
        self.quick = quick
        self.source = source / "run"
        self._scratch = source
        self._engines: dict[int, dict[str, float]] = {}
        self._trainers: dict[int, dict[str, float]] = {}
        train(config, [*SYSTEMS[ASYNC], *CALIBRATION], 7 if quick else 14, self.source)
        self._answers = answers(self.source)
        self._own = placement(load_settings(config, SYSTEMS[ASYNC]))

    def settings(self, flags: list[str]) -> Settings:
        """Of a system, with all that is known of its placement."""
        plain = load_settings(self.config, flags)
        places = placement(plain)
        measured = self._engine(places.workers[0].threads) | self._trainer(places.trainer.threads)
        words = [*flags, *self._answers, *times(measured)]
        if plain.launch.placement == "colocated":
            found = self._shared(flags, words)
        else:
            found = request_seconds(plain, places.workers[0], measured)
        return self._simulated(
            [*words, "--simulate.measured.per_answer", str(found)], SIMULATED_QUICK if self.quick else SIMULATED
        )

    def _engine(self, threads: int) -> dict[str, float]:
        if threads not in self._engines:
            self._engines[threads] = fit_engine(engine_steps(self.config, threads, rounds=1 if self.quick else 3))
        return self._engines[threads]

    def _trainer(self, threads: int) -> dict[str, float]:
        if threads not in self._trainers:
            own = threads == self._own.trainer.threads
            self._trainers[threads] = fit_trainer(self.source, None if own else trainer_times(self.source, threads))
        return self._trainers[threads]

    def _shared(self, flags: list[str], words: list[str]) -> float:
        """The wait for a batch of answers of one token, less what the simulator says of it, shared out among them."""
        steps = 5 if self.quick else 10
        with tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
            rows = train(self.config, [*flags, *ONE_TOKEN], steps, Path(scratch) / "run")
        real = statistics.median(row["time/wait_for_batch"] for row in rows[FIRST_STEPS:])
        result = simulate(self._simulated([*words, *ONE_TOKEN], 10), warmup=FIRST_STEPS)
        settings = load_settings(self.config, flags)
        mine = settings.control.batch_size * settings.rollout.group_size / settings.rollout.workers
        return max(0.0, real - result.trainer["wait"] * result.step_seconds) / mine

    def _simulated(self, words: list[str], steps: int) -> Settings:
        return load_settings(self.config, [*words, "--steps", str(steps), "--simulate.steps", str(steps)])


def placement(settings: Settings) -> Placement:
    """The run's."""
    return place(
        settings.launch.placement,
        available_cpus(),
        settings.rollout.workers,
        settings.rollout.threads,
        settings.trainer.threads,
    )


def predict(settings: Settings, seeds: Sequence[int]) -> dict[str, float]:
    """The figures of `async_vs_sync.run`, by simulation: the mean over `seeds`."""
    results = [
        simulate(settings.model_copy(update={"simulate": settings.simulate.model_copy(update={"seed": seed})}))
        for seed in seeds
    ]
    return {
        "tokens_per_second": statistics.fmean(r.trained_tokens_per_second for r in results),
        "seconds_per_step": statistics.fmean(r.step_seconds for r in results),
        "wait_share": statistics.fmean(r.trainer["wait"] for r in results),
        "staleness_mean": statistics.fmean(r.staleness_mean for r in results),
        "staleness_max": float(max(r.staleness_max for r in results)),
    }


def off_by(predicted: float, measured: float) -> float:
    """Relative; of what is nought, right if nought was predicted."""
    return predicted / measured - 1 if measured else float(predicted != 0)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For the documentation: a line a figure, but for those that are nought and were predicted so."""
    lines = ["| system | figure | predicted | measured (from, to) | off by |", "|---|---|---|---|---|"]
    for row in rows:
        if "measured" in row and (row["measured"] or row["predicted"]):
            show = FIGURES[row["figure"]][1]
            off = f"{row['off_by']:+.0%}" if "off_by" in row else ""
            spread_ = f"{show(row['measured'])} ({show(row['measured_min'])}, {show(row['measured_max'])})"
            name = FIGURES[row["figure"]][0]
            lines.append(f"| {row['system']} | {name} | {show(row['predicted'])} | {spread_} | {off} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/quickstart.toml")
    parser.add_argument("--quick", action="store_true", help="two systems, one short round (a minute)")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    steps, warmup = args.steps or (8 if args.quick else 32), 4 if args.quick else 8
    names = QUICK if args.quick else list(SYSTEMS)
    with tempfile.TemporaryDirectory() as scratch:
        calibration = Calibration(args.config, Path(scratch), args.quick)
        settings = {}
        for name in names:
            print(f"calibrating: {name}", file=sys.stderr)
            settings[name] = calibration.settings(SYSTEMS[name])
        predicted = {name: predict(settings[name], SEEDS[:1] if args.quick else SEEDS) for name in names}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(args.rounds or (1 if args.quick else 3)):
        for name in names:
            print(f"running: {name}", file=sys.stderr)
            measured[name].append(run(args.config, SYSTEMS[name], steps, warmup))
    rows: list[dict[str, Any]] = []
    for name in names:
        for figure in FIGURES:
            runs = spread([r[figure] for r in measured[name]])
            row = {"system": name, "figure": figure, "predicted": predicted[name][figure], "measured": runs["median"]}
            row |= {"measured_min": runs["min"], "measured_max": runs["max"]}
            if figure != "wait_share":
                row["off_by"] = off_by(row["predicted"], row["measured"])
            rows.append(row)
    for name in names:
        constants = settings[name].simulate.measured.model_dump(exclude_none=True)
        rows += [{"system": name, "figure": f"{key}, µs", "calibrated": 1e6 * v} for key, v in constants.items()]
    errors = {
        figure: max(abs(row["off_by"]) for row in rows if row["figure"] == figure)
        for figure in FIGURES
        if figure != "wait_share"
    }
    headline = {
        "worst_error": max(errors["seconds_per_step"], errors["staleness_mean"]),
        **{f"worst_{figure}": error for figure, error in errors.items()},
        "counted_steps": steps - warmup,
    }
    if not args.quick:
        before, rest = DOCS.read_text(encoding="utf-8").split(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    report("prediction", headline, rows)


if __name__ == "__main__":
    main()
