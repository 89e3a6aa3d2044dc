"""`fleuve plan MODEL`: from the command line's words to a printed and a written plan."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from fleuve.config.settings import Settings
from fleuve.simulate.known_times import with_known_times
from fleuve.simulate.plan import find_plan
from fleuve.simulate.plan_report import check_writable, print_plan, write_plan


def plan_command(settings: Settings, max_staleness: int, layouts: int, sensitivity: bool, write: Path | None) -> None:
    """Search, print, and write the best plan to `write` if given.

    Raises:
        UserError: nothing fits, or the file cannot be written; the latter is found out first.
    """
    if write is not None:
        check_writable(write)
    settings, remark = with_known_times(settings)
    terminal = sys.stderr.isatty()
    errors = Console(stderr=True)
    if terminal:
        with errors.status("looking for plans") as status:
            planned = find_plan(settings, max_staleness, layouts, sensitivity, lambda what: status.update(f"{what} …"))
    else:
        planned = find_plan(settings, max_staleness, layouts, sensitivity)
    print_plan(planned, Console())
    if remark:
        print(f"note: {remark}")
    if write is not None:
        write_plan(write, planned.best)
        print(f"written to {write}: fleuve check {write}, fleuve simulate {write}, fleuve train {write}")
