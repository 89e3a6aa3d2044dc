"""What `fleuve simulate` prints and draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fleuve.errors import UserError
from fleuve.simulate.outputs import check_output
from fleuve.simulate.result import SimulationResult

ROLLOUT = {
    "decode": ("decoding", "#1f6fa8"),
    "prefill": ("prompts", "#9ec9e2"),
    "recompute": ("computing caches again", "#c9a227"),
    "load": ("loading weights", "#7a5195"),
    "paused": ("standing still for the trainer", "#b0b0b0"),
    "idle": ("nothing to do", "#e0e0e0"),
}
TRAINER = {
    "train": ("training", "#1f6fa8"),
    "publish": ("publishing weights", "#7a5195"),
    "wait": ("waiting for a batch", "#e0e0e0"),
}


def print_result(result: SimulationResult, console: Console) -> None:
    """One run: a table of figures, and how far they reach."""
    table = _table(console, "", "")
    for name, value in _figures(result):
        table.add_row(name, value)
    console.print(table)
    counted = result.simulated - result.warmup if result.simulated > result.warmup else result.simulated
    note = f"{result.simulated} steps simulated in {result.wall_seconds:.0f} s, the last {counted} counted"
    if result.steps > result.simulated:
        note += f"; extrapolated from them to {result.steps} steps"
    console.print(note, soft_wrap=True)


def _figures(result: SimulationResult) -> list[tuple[str, str]]:
    rows = [
        (f"{result.steps} steps", f"{result.hours:.2f} h"),
        ("step", f"{result.step_seconds:.2f} s ({result.step_seconds_min:.2f} to {result.step_seconds_max:.2f})"),
        ("trained tokens a second", f"{result.trained_tokens_per_second:,.0f}"),
        ("generated tokens a second", f"{result.generated_tokens_per_second:,.0f}"),
        ("trainer", _shares(result.trainer, TRAINER)),
        (f"{result.engines} rollout engines", _shares(result.rollout, ROLLOUT)),
        ("answers at a time in an engine", f"{result.running:.1f}"),
        ("staleness of a token", f"{result.staleness_mean:.2f} in the mean, {result.staleness_max} at most"),
        ("tokens by staleness", ", ".join(f"{s}: {share:.0%}" for s, share in result.staleness.items())),
        ("a group, from admission to verdicts", f"{result.group_seconds:.1f} s"),
        ("a group, from there to its step", f"{result.ready_seconds:.1f} s"),
        ("answers with several versions", f"{result.interrupted_answers:.0%}"),
        ("new weights met by an answer", f"{result.interruptions:.2f} times"),
    ]
    if result.preemptions:
        rows.append(("preempted, of 100 answers", f"{100 * result.preemptions:.1f}"))
    rows += [(f"groups dropped: {reason.replace('_', ' ')}", str(n)) for reason, n in result.dropped.items()]
    return rows


def print_comparison(results: Mapping[str, SimulationResult], console: Console) -> None:
    """One line a system; the first is what the others' speed is compared with."""
    headings = ["system", "hours", "step", "tokens/s", "speed", "trainer waits", "engines decode", "caches again"]
    headings += ["idle", "staleness", "at most"]
    table = _table(console, *headings)
    reference = next(iter(results.values())).trained_tokens_per_second
    for name, r in results.items():
        table.add_row(
            name,
            f"{r.hours:.2f}",
            f"{r.step_seconds:.2f} s",
            f"{r.trained_tokens_per_second:,.0f}",
            f"{r.trained_tokens_per_second / reference:.2f}",
            f"{r.trainer['wait']:.0%}",
            f"{r.rollout['decode']:.0%}",
            f"{r.rollout['recompute']:.0%}",
            f"{r.rollout['idle'] + r.rollout['paused']:.0%}",
            f"{r.staleness_mean:.2f}",
            f"{r.staleness_max}",
        )
    console.print(table)
    first = next(iter(results.values()))
    console.print(
        f"{sum(r.simulated for r in results.values())} steps simulated in all; hours are for {first.steps} of each. "
        "Faster is not better by itself: docs/staleness.md has what staleness costs.",
        soft_wrap=True,
    )


def check_picture(path: Path) -> None:
    """Whether a picture can be drawn to `path`.

    Raises:
        UserError: matplotlib is not installed or does not know the kind of file, or nothing can be written there.
    """
    check_output("--plot", path)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise UserError(f"--plot {path}: no such kind of picture; end its name in .png, or one of .{', .'.join(kinds)}")


def draw(path: Path, results: Mapping[str, SimulationResult]) -> None:
    """Where the time of both sides goes, and how stale what is trained is; a row a system.

    Raises:
        UserError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    height = 1.6 + 0.55 * len(results) if len(results) > 1 else 3.2
    figure = Figure(figsize=(13, height), dpi=120, layout="constrained", facecolor="white")
    axes = figure.subplots(1, 3, width_ratios=[5, 4, 4], sharey=len(results) > 1)
    names = list(results)
    for ax, side, parts, title in (
        (axes[0], "rollout", ROLLOUT, "rollout engines' time"),
        (axes[1], "trainer", TRAINER, "trainer's time"),
    ):
        left = [0.0] * len(names)
        for key, (label, colour) in parts.items():
            widths = [getattr(results[name], side)[key] for name in names]
            ax.barh(names, widths, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        ax.set(xlim=(0, 1), title=title)
        ax.legend(frameon=False, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    if len(results) > 1:
        axes[2].barh(names, [r.trained_tokens_per_second for r in results.values()], color="#1f6fa8")
        axes[2].set_title("trained tokens a second")
        axes[0].invert_yaxis()
    else:
        only = results[names[0]]
        axes[2].bar(list(only.staleness), list(only.staleness.values()), color="#b8860b")
        axes[2].set(title="staleness of trained tokens", xlabel="versions")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written: {error.strerror or error}") from None


def _shares(shares: Mapping[str, float], parts: Mapping[str, tuple[str, str]]) -> str:
    """The larger ones, in words."""
    shown = [f"{shares[key]:.0%} {label}" for key, (label, _) in parts.items() if shares[key] >= 0.005]
    return ", ".join(shown)


def _table(console: Console, *headings: str) -> Table:
    """With lines in a terminal, plain where the output goes to a file or another program."""
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        show_header=any(headings),
        pad_edge=False,
        padding=(0, 1),
    )
    for number, heading in enumerate(headings):
        right = number > 0 and any(headings)
        table.add_column(heading, justify="right" if right else "left", overflow="fold", no_wrap=number == 0)
    return table
