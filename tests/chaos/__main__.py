"""Chaos: real runs whose processes are killed and stopped at random moments, each in the end whole.

    python tests/chaos --seeds 0..100 [--keep DIR] [--report FILE]      many seeds
    python tests/chaos --seeds 17                                       one: its plan again

A seed is a plan (`chaos_plan.draw`). The same seed gives the same plan; what a signal meets there is up to the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from chaos_plan import KINDS, Plan, draw
from chaos_run import Outcome, final_state, play

sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every run was whole in the end."""
    parser = argparse.ArgumentParser(prog="python tests/chaos", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, default=range(100), help="A..B (without B), or one")
    parser.add_argument("--keep", type=Path, help="where the directories of runs that failed go (default: a new one)")
    parser.add_argument("--report", type=Path, help="a JSON file for the outcomes, written after each")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    references: dict[Plan, bytes] = {}
    outcomes: list[Outcome] = []
    for seed in options.seeds:
        plan = draw(seed)
        outcome = _one(plan, _reference(plan, references) if plan.exact else None, options.keep)
        outcomes.append(outcome)
        print(outcome.line())
        if options.report:
            options.report.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    print(summary(outcomes))
    return int(any(outcome.wrong for outcome in outcomes))


def summary(outcomes: Sequence[Outcome]) -> str:
    """The statistics of many runs."""
    done = Counter((fault.kind, fault.action) for outcome in outcomes for fault in outcome.done)
    lines = [f"{'':16}  kill -9  SIGSTOP  SIGSTOP, SIGCONT"]
    for kind in KINDS:
        lines.append(f"{kind:16}  {done[kind, 'kill']:7}  {done[kind, 'stop']:7}  {done[kind, 'pause']:16}")
    wrong = [outcome.plan.seed for outcome in outcomes if outcome.wrong]
    ended = Counter(error.split(":")[0] for outcome in outcomes for error in outcome.errors)
    lines += [
        f"{len(outcomes)} runs, {sum(outcome.lives for outcome in outcomes)} lives of controllers, "
        f"{sum(done.values())} faults; seconds a run: {sum(o.seconds for o in outcomes) / max(1, len(outcomes)):.0f}",
        f"rollout workers given up: {sum(o.workers for o in outcomes)}; trainers started again: "
        f"{sum(o.trainers for o in outcomes)}; answers without a verdict: {sum(o.no_verdict for o in outcomes)}",
        f"ended by themselves, to be started again: {dict(ended) or 'none'}",
        f"not whole: seeds {wrong}" if wrong else "all whole in the end",
    ]
    return "\n".join(lines)


def _one(plan: Plan, reference: bytes | None, keep: Path | None) -> Outcome:
    directory = Path(tempfile.mkdtemp(prefix=f"fleuve-chaos-{plan.seed}-"))
    outcome = play(plan, directory, reference)
    if outcome.wrong:
        kept = directory
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            kept = Path(shutil.move(directory, keep))
        print(f"{plan.describe()}\n  {outcome.line()}\n  what is left of it: {kept}")
    else:
        shutil.rmtree(directory)
    return outcome


def _reference(plan: Plan, references: dict[Plan, bytes]) -> bytes:
    """Plans that differ in nothing but their misfortunes come to the same."""
    calm = replace(plan, seed=0, faults=(), checkpoint_every=0)
    if calm not in references:
        with tempfile.TemporaryDirectory(prefix="fleuve-chaos-calm-") as directory:
            outcome = play(calm, Path(directory))
            if outcome.wrong:
                raise SystemExit(f"a run that nothing happens to: {outcome.line()}")
            references[calm] = final_state(Path(directory) / "run")
    return references[calm]


def _seeds(text: str) -> range:
    first, dots, end = text.partition("..")
    return range(int(first), int(end) if dots else int(first) + 1)


if __name__ == "__main__":
    sys.exit(main())
