"""What `kill -9` costs a run: the time to the next trained step, and what had been generated and is lost.

For each kind of process a run of the small model that ships with Fleuve, with two rollout workers (or one). It is
killed after some steps; the controller is started again by the same command at once. Measured are

    next step   seconds from the kill to the next line in metrics.jsonl (a step that was nearly done counts)
    costs       how much later than at the pace before the kill the fifth step after it comes, seconds
    lost        tokens that the workers have sampled, over the whole run, and that were not trained

`nothing` is a run that nothing happens to: what the other figures would be without a kill.

With `--quick` it is one run for all kinds, one after the other, and what is lost is told of the run as a whole.

    python benchmarks/recovery.py [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _report import report, spread

HERE = Path(__file__).parent
BEFORE, AFTER = 12, 5
"""Steps before the kill, and those after it within which a run is expected to have its pace again."""
QUICK_BEFORE, QUICK_AFTER = 6, 4
DEADLINE = 240.0

CONFIG = """
run_dir = "run"
steps = {steps}
[model]
path = "builtin:small"
[data]
train = "procedural:chain"
[rollout]
workers = {workers}
group_size = 8
max_new_tokens = 256
[control]
batch_size = 8
max_staleness = 2
[trainer]
learning_rate = 1e-4
[checkpoint]
every = 5
[reward]
workers = 2
[observe]
live = "off"
tensorboard = false
"""


@dataclass(frozen=True)
class Kind:
    """Which process, in a run with so many rollout workers."""

    name: str
    workers: int
    word: str
    """In its command line; none for a run that nothing happens to."""


KINDS = (
    Kind("nothing", 2, ""),
    Kind("rollout worker, one of two", 2, "fleuve.engine"),
    Kind("rollout worker, the only one", 1, "fleuve.engine"),
    Kind("trainer", 2, "fleuve.train"),
    Kind("reward worker", 2, "fleuve.rewards.forkserver"),
    Kind("controller", 2, "_counted_run.py"),
)


QUICK = ("rollout worker, one of two", "trainer", "controller")
"""What `--quick` kills: of the others there is nothing to be seen, or they need a run of their own."""


@dataclass(frozen=True)
class Found:
    """Of one kill. What the run lost in all, if it was the only one."""

    next_step: float
    costs: float
    lost: int
    generated: int


class Tokens:
    """How many tokens each worker's process has sampled, as of the last look; one that died keeps what it had."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._counts: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Tokens:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def look(self) -> None:
        """Ask all that listen."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        for worker in map(json.loads, lines):
            headers = {"Authorization": f"Bearer {worker['token']}"}
            request = urllib.request.Request(f"{worker['url']}/metrics", headers=headers)
            with contextlib.suppress(OSError, ValueError):
                with urllib.request.urlopen(request, timeout=2.0) as answer:
                    count = int(json.load(answer)["tokens_generated"])
                self._counts[worker["pid"]] = max(count, self._counts.get(worker["pid"], 0))

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            self.look()


class Run:
    """The command, and its steps as they come."""

    def __init__(self, directory: Path, kind: Kind, steps: int) -> None:
        self.directory = directory
        self.times: list[float] = []
        """When each step was first seen."""
        (directory / "config.toml").write_text(CONFIG.format(steps=steps, workers=kind.workers))
        self.start()

    def start(self) -> None:
        with (self.directory / "output.txt").open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "_counted_run.py"), "workers.jsonl", "config.toml"],
                cwd=self.directory,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )

    def until(self, condition: Callable[[], bool]) -> None:
        """Look every 10 ms."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            if time.monotonic() > deadline or self.process.poll() not in (None, 0):
                raise SystemExit((self.directory / "output.txt").read_text())
            time.sleep(0.01)

    def steps(self) -> int:
        """How many are reported."""
        with contextlib.suppress(FileNotFoundError):
            count = (self.directory / "run" / "metrics.jsonl").read_bytes().count(b"\n")
            self.times += [time.monotonic()] * (count - len(self.times))
        return len(self.times)

    def trained(self) -> int:
        """Tokens of answers that were trained."""
        rows = [json.loads(line) for f in self.directory.glob("run/rollouts/*") for line in f.read_text().splitlines()]
        return sum(len(answer["output_ids"]) for row in rows for answer in row["trajectories"])

    def victim(self, word: str) -> psutil.Process:
        controller = psutil.Process(self.process.pid)
        found = [p for p in [controller, *controller.children(recursive=True)] if word in " ".join(p.cmdline())]
        return found[-1]  # of nursery and reward workers a worker: it came later


def measure(kinds: Sequence[Kind], before: int, after: int, rng: random.Random) -> list[Found]:
    """One run, with a kill of the first kind after `before` steps, and of the others `after` steps later each."""
    with tempfile.TemporaryDirectory(prefix="fleuve-recovery-") as scratch:
        directory = Path(scratch)
        run = Run(directory, kinds[0], before + (len(kinds) + 1) * after)
        with Tokens(directory / "workers.jsonl") as tokens:
            try:
                run.until(lambda: run.steps() >= before)
                pace = (run.times[-1] - run.times[2]) / (len(run.times) - 3)
                kills = [strike(kind, run, tokens, after, rng.uniform(0.0, pace)) for kind in kinds]
                run.until(lambda: run.process.poll() == 0)
            finally:
                run.process.kill()
                run.process.wait()
        return [
            Found(
                next_step=run.times[done] - killed,
                costs=run.times[done + after - 1] - killed - after * pace,
                lost=tokens.total - run.trained(),
                generated=tokens.total,
            )
            for killed, done in kills
        ]


def strike(kind: Kind, run: Run, tokens: Tokens, after: int, delay: float) -> tuple[float, int]:
    """Kill one, and wait for the steps `after`: when it was, and how many steps were reported by then."""
    time.sleep(delay)
    victim = run.victim(kind.word) if kind.word else None
    tokens.look()
    done = run.steps()
    killed = time.monotonic()
    if victim is not None:
        victim.kill()
    if kind.name == "controller":
        run.process.wait()
        run.start()
    run.until(lambda: run.steps() >= done + after)
    return killed, done


def row(kind: Kind, found: list[Found]) -> dict[str, Any]:
    """Of the table: medians, and the extremes of what is counted."""
    next_step, lost = spread([f.next_step for f in found]), spread([f.lost for f in found])
    return {
        "killed": kind.name,
        "next step, s": next_step["median"],
        "min": next_step["min"],
        "max": next_step["max"],
        "costs, s": statistics.median(f.costs for f in found),
        "lost tokens": int(lost["median"]),
        "most": int(lost["max"]),
        "of those generated, %": 100 * statistics.median(f.lost / f.generated for f in found),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one run, fewer steps, fewer kinds")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds, before, after = (1, QUICK_BEFORE, QUICK_AFTER) if options.quick else (options.rounds, BEFORE, AFTER)
    rng = random.Random(0)
    found: dict[str, list[Found]] = {kind.name: [] for kind in KINDS}
    runs = [[k for k in KINDS if k.name in QUICK]] if options.quick else [[kind] for kind in KINDS]
    for _ in range(rounds):
        for kinds in runs:
            for kind, one in zip(kinds, measure(kinds, before, after, rng), strict=True):
                found[kind.name].append(one)
                print(kind.name, one, flush=True)
    rows = [row(kind, found[kind.name]) for kind in KINDS if found[kind.name]]
    headline: dict[str, Any] = {"rounds": rounds, "steps_before_the_kill": before, "steps_after": after}
    headline |= {f"next_step_after_{r['killed']}": r["next step, s"] for r in rows}
    if options.quick:
        headline["lost_share"] = rows[0]["of those generated, %"] / 100
    else:
        headline |= {f"lost_share_{r['killed']}": r["of those generated, %"] / 100 for r in rows}
    report("recovery", headline, rows)


if __name__ == "__main__":
    main()
