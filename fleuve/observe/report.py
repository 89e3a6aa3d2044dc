"""`fleuve report RUN`: the run in a table, and as a picture (`RUN/report.png`) if matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fleuve.config.nearest import did_you_mean, nearest_path
from fleuve.errors import UserError
from fleuve.observe.live import is_headline
from fleuve.observe.metrics import read_metrics
from fleuve.observe.rundir import RunDirectory

Row = dict[str, Any]

_ENDS = 10  # the first and the last so many steps are compared, or the two halves of a shorter run


_BY_STALENESS = {
    "tokens": ("tokens", "{:.0%}"),
    "clipped": ("clip_fraction", "{:.2%}"),
    "capped": ("capped_fraction", "{:.2%}"),
    "mean w": ("behaviour_weight_mean", "{:.3f}"),
    "effective sample": ("effective_sample_size", "{:.3f}"),
    "KL to its sampler": ("kl_behaviour_proximal", "{:.5f}"),
}
"""Heading → metric of `by_staleness/METRIC/BUCKET`, and how it is shown."""


def report(path: str | Path, console: Console | None = None) -> Path | None:
    """Print a run's summary; returns where the picture is, or None without matplotlib.

    Raises:
        UserError: no run there, or one without any step.
    """
    console = console or Console()
    run = RunDirectory(path)
    if not run.metrics.is_file():
        if run.root.is_dir():
            raise UserError(f"{run.root} holds no metrics.jsonl: it is not a run directory")
        raise UserError(f"no such run: {run.root}{did_you_mean(nearest_path(run.root))}")
    rows = read_metrics(run.metrics)
    if not rows:
        raise UserError(f"{run.metrics} is empty: the run ended before its first step")
    table = Table(title=str(run.root), title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in summarise(rows):
        table.add_row(f"[bold]{name}[/bold]", value)
    console.print(table)
    if stalenesses := by_staleness(rows):
        console.print(_staleness_table(stalenesses))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        console.print("no picture: matplotlib is not installed")
        return None
    picture = run.root / "report.png"
    draw(rows, picture)
    console.print(f"picture: {picture}")
    return picture


def summarise(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What the run came to, as names and texts. Metrics that no row has are left out."""
    lines = [("steps", f"{_last(rows, 'step'):.0f}")]
    elapsed = _last(rows, "time/elapsed")
    if elapsed is not None:
        lines.append(("duration", f"{elapsed:.0f} s"))
    count = max(1, min(_ENDS, len(rows) // 2))
    ends = f"first {count} steps → last {count}"
    for title, key in (("solved", "reward/solved"), ("reward", "reward/mean"), ("length", "response/length_mean")):
        values = _column(rows, key)
        if values:
            digits = 1 if title == "length" else 3
            first, last = _mean(values[:count]), _mean(values[-count:])
            lines.append((title, f"{first:.{digits}f} → {last:.{digits}f}   ({ends})"))
    for key in sorted({k for row in rows for k in row if is_headline(k)}):
        values = _column(rows, key)
        if values:
            lines.append((key, f"{values[0]:.3f} → {values[-1]:.3f}   ({len(values)} evaluations)"))
    if _column(rows, "staleness/mean"):
        mean, worst = _mean(_column(rows, "staleness/mean")), max(_column(rows, "staleness/max"), default=0.0)
        lines.append(("staleness", f"mean {mean:.2f}, max {worst:.0f}"))
    interrupted = sum(_column(rows, "rollout/interrupted"))
    lines.append(("interrupted", f"{interrupted:.0f} answers hold tokens of several versions"))
    if trained := sum(_column(rows, "tokens/trained")):
        rate = f", {trained / elapsed:.0f} a second" if elapsed else ""
        lines.append(("trained", f"{trained:,.0f} tokens{rate}"))
    if dropped := _last(rows, "groups/dropped"):
        reasons = sorted({key for row in rows for key in row if key.startswith("groups/dropped/")})
        counts = ", ".join(f"{_last(rows, key):.0f} {key.rpartition('/')[2].replace('_', ' ')}" for key in reasons)
        lines.append(("dropped", f"{dropped:.0f} groups" + (f" ({counts})" if counts else "")))
    step_seconds = sum(_column(rows, "time/step"))
    if step_seconds:
        waiting = sum(_column(rows, "time/wait_for_batch")) / step_seconds
        lines.append(("trainer waited", f"{waiting:.0%} of the time"))
    return lines


def by_staleness(rows: Sequence[Row]) -> dict[str, Row]:
    """Of the last steps, what the loss saw of the tokens of each staleness: bucket → metric → mean over its tokens.
    `tokens` is the bucket's share."""
    sums: dict[str, dict[str, float]] = {}
    for row in rows[-_ENDS:]:
        for key, value in row.items():
            prefix, _, rest = key.partition("/")
            if prefix != "by_staleness" or value is None:
                continue
            name, _, bucket = rest.rpartition("/")
            count = 1.0 if name == "tokens" else float(row[f"by_staleness/tokens/{bucket}"])
            column = sums.setdefault(bucket, {})
            column[name] = column.get(name, 0.0) + count * float(value)
    whole = sum(column["tokens"] for column in sums.values())
    return {
        bucket: {name: value / (whole if name == "tokens" else column["tokens"]) for name, value in column.items()}
        for bucket, column in sorted(sums.items(), key=lambda item: int(item[0].rstrip("+").partition("-")[0]))
    }


def _staleness_table(stalenesses: dict[str, Row]) -> Table:
    table = Table(title="what the loss saw in the last steps, by staleness", title_justify="left", box=None)
    for heading in ("staleness", *_BY_STALENESS):
        table.add_column(heading, justify="right")
    for bucket, means in stalenesses.items():
        table.add_row(bucket, *(shown.format(means[name]) for name, shown in _BY_STALENESS.values()))
    return table


def draw(rows: Sequence[Row], picture: Path) -> None:
    """Two panels against time: what is solved (and the evaluations), and the staleness of what was trained."""
    from matplotlib.figure import Figure

    seconds = _seconds(rows)
    unit, name = (60.0, "minutes") if seconds[-1] < 7200 else (3600.0, "hours")
    times = [s / unit for s in seconds]
    figure = Figure(figsize=(9.6, 4.8), dpi=160, layout="constrained", facecolor="white")
    solved, stale = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])

    at, values = _series(times, rows, "reward/solved")
    solved.plot(at, values, color="#9ec9e2", linewidth=1.0)
    solved.plot(at, smooth(values), color="#1f6fa8", linewidth=2.4, label="solved in training (per step, and smoothed)")
    palette = ("#d1495b", "#edae49", "#66a182")
    evaluations = sorted({k for row in rows for k in row if k.startswith("eval/") and k.endswith("pass@1")})
    for colour, key in zip(palette, evaluations, strict=False):
        at, values = _series(times, rows, key)
        solved.plot(at, values, "o--", color=colour, linewidth=1.2, markersize=6, label=f"{key[5:]} (held out)")
    solved.set_ylabel("fraction solved")
    solved.set_ylim(0, 1)
    solved.legend(frameon=False, loc="lower right", fontsize=9)

    at, values = _series(times, rows, "staleness/max")
    stale.step(at, values, where="post", color="#c9a227", linewidth=1.2, label="max")
    at, values = _series(times, rows, "staleness/mean")
    stale.fill_between(at, values, color="#e8c872", alpha=0.5, linewidth=0)
    stale.plot(at, values, color="#b8860b", linewidth=1.8, label="mean")
    stale.set_ylabel("staleness\n(versions)")
    stale.set_ylim(bottom=0)
    stale.yaxis.get_major_locator().set_params(integer=True)
    stale.set_xlabel(name)
    stale.legend(frameon=False, loc="lower right", fontsize=9, ncols=2)
    for axes in (solved, stale):
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    figure.savefig(picture)


def smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential mean, corrected for its start: the first value is itself."""
    smoothed, total, mass = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        smoothed.append(total / mass)
    return smoothed


def _seconds(rows: Sequence[Row]) -> list[float]:
    """When each step ended: `time/elapsed`, or the steps' own durations added up."""
    total, seconds = 0.0, []
    for row in rows:
        total = row.get("time/elapsed") or total + (row.get("time/step") or 0.0)
        seconds.append(total)
    return seconds


def _series(times: Sequence[float], rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    points = [(t, float(row[key])) for t, row in zip(times, rows, strict=True) if row.get(key) is not None]
    return [t for t, _ in points], [v for _, v in points]


def _column(rows: Sequence[Row], key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]


def _last(rows: Sequence[Row], key: str) -> float | None:
    values = _column(rows, key)
    return values[-1] if values else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
