"""`fleuve simulate CONFIG`: from the command line's words to figures, a picture and a timeline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from fleuve.config.settings import Settings
from fleuve.contracts import RunError
from fleuve.errors import UserError
from fleuve.simulate.candidates import misfit
from fleuve.simulate.known_times import with_known_times
from fleuve.simulate.result import SimulationResult
from fleuve.simulate.run import simulate, simulated_steps
from fleuve.simulate.simulate_report import check_picture, draw, print_comparison, print_result
from fleuve.simulate.systems import systems
from fleuve.simulate.timeline import check_timeline

PIPED_WIDTH = 200
"""Columns of a table that nobody looks at in a terminal."""


def simulate_command(settings: Settings, compare: bool, plot: Path | None, trace: Path | None) -> None:
    """Simulate, print, draw to `plot` and write the timeline to `trace` if given.

    Raises:
        UserError: what the settings ask for cannot be, or a file cannot be written; the latter is found out first.
        RunError: a run of these settings would fail.
    """
    if compare and trace is not None:
        raise UserError("--trace is of one run: leave --compare out")
    if plot is not None:
        check_picture(plot)
    if trace is not None:
        check_timeline(trace)
    settings, remark = with_known_times(settings)
    runs = systems(settings) if compare else {"this run": settings}
    results = {}
    for name, run in runs.items():
        with _shown(f"{name}: step" if compare else "step", simulated_steps(run)) as progress:
            results[name] = _simulated(run, f"{name}: " if compare else "", remark, trace, progress)
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    if compare:
        print_comparison(results, console)
    else:
        print_result(results["this run"], console)
    if remark:
        console.print(f"note: {remark}", soft_wrap=True)
    for name, result in results.items():
        if result.caveat:
            console.print(f"note: {f'{name}: ' if compare else ''}{result.caveat}", soft_wrap=True)
    for name, run in runs.items():
        if run.simulate.gpus is not None and (problem := misfit(run)) is not None:
            console.print(f"note: {f'{name}: ' if compare else ''}it would not fit: {problem.reason}", soft_wrap=True)
    if plot is not None:
        draw(plot, results)
    for path in (plot, trace):
        if path is not None:
            print(f"written to {path}")


def _simulated(
    run: Settings, name: str, remark: str, trace: Path | None, progress: Callable[[int], None] | None
) -> SimulationResult:
    try:
        return simulate(run, trace=trace, progress=progress)
    except RunError as error:
        raise RunError(f"{name}{error}{f' ({remark})' if remark else ''}") from None


@contextmanager
def _shown(what: str, of: int) -> Iterator[Callable[[int], None] | None]:
    """In a terminal, how far it is."""
    if not sys.stderr.isatty():
        yield None
        return
    with Console(stderr=True).status(what) as status:
        yield lambda done: status.update(f"{what} {done} of {of}")
