"""Many seeds, several runs at once, and what they came to."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from chaos_plan import KINDS, Plan, draw
from chaos_run import Outcome, final_state, play


def play_many(seeds: Sequence[int], at_once: int, keep: Path | None) -> Iterator[Outcome]:
    """The outcomes, in the order in which the runs end. What is left of those that were not whole goes below `keep`.

    Raises:
        RuntimeError: a run that nothing happens to was not whole.
    """
    plans = [draw(seed) for seed in seeds]
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
        references = {calm: pool.submit(_reference, calm) for calm in {_calm(plan) for plan in plans if plan.exact}}
        runs = [pool.submit(_one, plan, None, keep) for plan in plans if not plan.exact]
        for plan in plans:
            if plan.exact:
                runs.append(pool.submit(_one, plan, references[_calm(plan)].result(), keep))
        for run in as_completed(runs):
            yield run.result()


def summary(outcomes: Sequence[Outcome]) -> str:
    """The statistics of many runs."""
    done = Counter((fault.kind, fault.action) for outcome in outcomes for fault in outcome.done)
    lines = [f"{'':16}  kill -9  SIGSTOP  SIGSTOP, SIGCONT"]
    for kind in KINDS:
        lines.append(f"{kind:16}  {done[kind, 'kill']:7}  {done[kind, 'stop']:7}  {done[kind, 'pause']:16}")
    wrong = sorted(outcome.plan.seed for outcome in outcomes if outcome.wrong)
    sharded = [outcome for outcome in outcomes if outcome.plan.ranks > 1]
    ranks = Counter(rank for outcome in sharded for rank in outcome.ranks)
    ended = Counter(error.split(":")[0] for outcome in outcomes for error in outcome.errors)
    lines += [
        f"{len(outcomes)} runs, {sum(outcome.lives for outcome in outcomes)} lives of controllers, "
        f"{sum(done.values())} faults; seconds a run: {sum(o.seconds for o in outcomes) / max(1, len(outcomes)):.0f}",
        f"trainers of two ranks: {len(sharded)}; the first rank was hit {ranks[0]} times, the other {ranks[1]} times",
        f"rollout workers given up: {sum(o.workers for o in outcomes)}; trainers started again: "
        f"{sum(o.trainers for o in outcomes)}; answers without a verdict: {sum(o.no_verdict for o in outcomes)}",
        f"ended by themselves, to be started again: {dict(ended) or 'none'}",
        f"not whole: seeds {wrong}" if wrong else "all whole in the end",
    ]
    return "\n".join(lines)


def _one(plan: Plan, reference: dict[str, bytes] | None, keep: Path | None) -> Outcome:
    directory = Path(tempfile.mkdtemp(prefix=f"fleuve-chaos-{plan.seed}-"))
    outcome = play(plan, directory, reference)
    if outcome.wrong:
        kept = directory
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            kept = Path(shutil.move(directory, keep))
        print(f"{plan.describe()}\n  {outcome.line()}\n  what is left of it: {kept}", flush=True)
    else:
        shutil.rmtree(directory)
    return outcome


def _calm(plan: Plan) -> Plan:
    """Exact plans that differ in nothing but their misfortunes come to the same as this one."""
    return replace(plan, seed=0, faults=(), checkpoint_every=0)


def _reference(calm: Plan) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="fleuve-chaos-calm-") as directory:
        outcome = play(calm, Path(directory))
        if outcome.wrong:
            raise RuntimeError(f"a run that nothing happens to: {outcome.line()}")
        return final_state(Path(directory) / "run")
