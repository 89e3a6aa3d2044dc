"""Chaos: real runs whose processes are killed and stopped at random moments, each in the end whole.

    python tests/chaos --seeds 0..100 [--at-once N] [--keep DIR] [--report FILE]      many seeds
    python tests/chaos --seeds 17                                                     one: its plan again

A seed is a plan (`chaos_plan.draw`). The same seed gives the same plan; what a signal meets there is up to the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from chaos_many import play_many, summary
from chaos_run import Outcome

sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every run was whole in the end."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python tests/chaos", description=__doc__, formatter_class=form)
    parser.add_argument("--seeds", type=_seeds, default=range(100), help="A..B (without B), or one")
    cores = len(os.sched_getaffinity(0))
    at_once = "runs at a time (default: one a core and one more, since each waits now and then)"
    parser.add_argument("--at-once", type=int, default=cores + 1, help=at_once)
    parser.add_argument("--keep", type=Path, help="where the directories of runs that failed go (default: a new one)")
    parser.add_argument("--report", type=Path, help="a JSON file for the outcomes, written after each")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in play_many(options.seeds, options.at_once, options.keep):
        outcomes.append(outcome)
        print(outcome.line())
        if options.report:
            options.report.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    print(f"{summary(outcomes)}\nin {(time.monotonic() - began) / 60:.1f} minutes")
    return int(any(outcome.wrong for outcome in outcomes))


def _seeds(text: str) -> range:
    first, dots, end = text.partition("..")
    return range(int(first), int(end) if dots else int(first) + 1)


if __name__ == "__main__":
    sys.exit(main())
