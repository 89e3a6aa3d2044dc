"""Plays a plan: the run of a seed, its misfortunes, the same command again until it is done, and the books."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_books import state_in, violations
from chaos_journal import Keeper
from chaos_plan import PROMPTS, STEPS, Fault, Kind, Plan
from chaos_processes import MARK, Census, clear_away, describe, rank_of, send

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")

DEADLINE = 600.0
"""Seconds for one run with all its misfortunes."""
GONE = 10.0
"""Seconds within which every process of a run has ended, once its controller has."""
LIVES = 12
TICK = 0.02
NOBODY = 3.0
"""Seconds to wait for somebody of the kind that is to be hit: it may be about to be started again."""

CONFIG = """
run_dir = "run"
steps = {steps}
seed = {seed}
[model]
path = "builtin:{model}"
[data]
train = "data.jsonl"
verifier = "{verifier}"
[rollout]
group_size = 3
max_new_tokens = 96
health_timeout = 2.0
update_timeout = 20.0
start_timeout = 120.0
no_worker_timeout = 90.0
[control]
batch_size = 4
[trainer]
learning_rate = 1e-3
minibatches = 2
health_timeout = 4.0
start_timeout = 120.0
[reward]
workers = 2
start_timeout = 30.0
[checkpoint]
keep = 2
[observe]
live = "off"
tensorboard = false
"""


@dataclass
class Outcome:
    """What came of one plan. `wrong` is empty if every promise was kept."""

    plan: Plan
    wrong: list[str] = field(default_factory=list)
    done: list[Fault] = field(default_factory=list)
    """The faults for which there was still time, and somebody to be hit."""
    lives: int = 0
    errors: list[str] = field(default_factory=list)
    """What the run said where it ended by itself before it was done."""
    seconds: float = 0.0
    trainers: int = 0
    workers: int = 0
    """How often a trainer and a rollout worker were started again beside a controller that went on."""
    moved: int = 0
    kept: int = 0
    no_verdict: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    ranks: list[int] = field(default_factory=list)
    """Those that were hit, where the trainer has several."""

    def line(self) -> str:
        """In short."""
        said = "; ".join(self.wrong) if self.wrong else "ok"
        return (
            f"seed {self.plan.seed}: {said}  ({len(self.done)} of {len(self.plan.faults)} faults, {self.lives} lives, "
            f"{self.seconds:.0f} s)"
        )


def play(plan: Plan, directory: Path, reference: dict[str, bytes] | None = None) -> Outcome:
    """Run `plan` in the empty `directory`. `reference`: the trainer's state of a run that nothing happens to."""
    return _Play(plan, directory).play(reference)


class _Play:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.run = directory / "run"
        self.outcome = Outcome(plan)
        self.mark = uuid.uuid4().hex
        self.census = Census(self.mark)
        self.controllers: list[int] = []
        self._faults = list(plan.faults)
        self._later: list[tuple[float, psutil.Process, int]] = []
        self._due_since: float | None = None
        self._process: subprocess.Popen[str] | None = None
        self._life_began = 0.0
        self._reported: dict[int, float] = {}  # when each step was first seen
        self._hit = False  # in this life
        _write_inputs(plan, directory)

    def play(self, reference: dict[str, bytes] | None) -> Outcome:
        began = time.monotonic()
        keeper = Keeper(self.run / "journal", self.directory / "kept")
        try:
            self._until_done(keeper, began + DEADLINE)
            if not self.outcome.wrong:
                keeper.look()
                self._count()
                records = keeper.records()
                self.outcome.wrong += violations(self.plan, self.run, records)
                if reference is not None and final_state(self.run) != reference:
                    self.outcome.wrong.append("the weights are not those of a run that nothing happened to")
        except Exception as error:  # a record that cannot be read is as wrong as one that says something else
            self.outcome.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            clear_away(self.mark)
            if self._process is not None:
                self._process.wait()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # --- lives ------------------------------------------------------------------------------------------------------

    def _until_done(self, keeper: Keeper, deadline: float) -> None:
        for look in itertools.count():
            if self._process is None:
                self._begin_life()
            assert self._process is not None
            status = self._process.poll()
            keeper.look()
            if status is not None:
                keeper.look()
                self._end_life(status)
                if status == 0 or self.outcome.wrong:
                    return
                continue
            if look % 10 == 0:
                self.census.take(self._process.pid)
            self._let_things_happen()
            if time.monotonic() > deadline:
                self.outcome.wrong.append(f"not done after {DEADLINE:g} s, at step {self._steps()}: {self._tail()}")
                return
            time.sleep(TICK)

    def _begin_life(self) -> None:
        self.outcome.lives += 1
        if self.outcome.lives > LIVES:
            raise RuntimeError(f"not done after {LIVES} lives")
        with self._log().open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fleuve", "train", "config.toml", *self.plan.flags()],
                cwd=self.directory,
                env=environment() | {MARK: self.mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.controllers.append(self._process.pid)
        self._life_began = time.monotonic()
        self._hit = False

    def _end_life(self, status: int) -> None:
        """Whatever it died of: nothing of it is left."""
        said = self._log().read_text()
        if "Traceback" in said:
            self.outcome.wrong.append(f"a traceback in {self._log().name}: {said.splitlines()[-1]}")
        if status > 0:
            self.outcome.errors.append(f"exit code {status}: {self._tail()}")
            if not self._hit:
                self.outcome.wrong.append(f"ended by itself, exit code {status}: {self._tail()}")
        for at, process, number in sorted(self._later, key=lambda entry: entry[0]):
            time.sleep(max(at - time.monotonic(), 0.0))  # whoever was stopped for a while is so no longer than that
            send(process, number)
        if left := self.census.survivors(GONE):
            self.outcome.wrong.append(f"orphans {GONE:g} s after the end (status {status}): {describe(left)}")
        if status == 0 and (left_over := self._shared_memory()):
            self.outcome.wrong.append(f"shared memory is left: {left_over}")
        self._later.clear()
        self._process = None

    def _shared_memory(self) -> list[str]:
        return [path.name for pid in self.controllers for path in SHARED_MEMORY.glob(f"fleuve-{pid}-*")]

    def _log(self) -> Path:
        return self.directory / f"life-{self.outcome.lives}.txt"

    def _tail(self) -> str:
        return " | ".join(self._log().read_text().splitlines()[-4:])

    # --- misfortunes ------------------------------------------------------------------------------------------------

    def _let_things_happen(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            self._send(entry[1], entry[2])
        assert self._process is not None
        if self._process.returncode is None and self._faults and self._is_due(self._faults[0], now):
            if self._strike(self._faults[0], now):
                self.outcome.done.append(self._faults.pop(0))
                self._due_since = None
            elif now - (self._due_since or now) > NOBODY:
                self._faults.pop(0)
                self._due_since = None
            else:
                self._due_since = self._due_since or now

    def _send(self, target: psutil.Process, number: int) -> bool:
        """Whether it was still there. A life that is over meets no more misfortunes: nobody would be there to mend."""
        sent = send(target, number)
        if sent and number == signal.SIGKILL and self._process is not None and target.pid == self._process.pid:
            self._process.wait()
        return sent

    def _is_due(self, fault: Fault, now: float) -> bool:
        if fault.step is None:
            return now - self._life_began >= fault.delay
        if fault.step == 0 and self._sampling():
            self._reported.setdefault(0, now)
        for step in range(1, self._steps() + 1):
            self._reported.setdefault(step, now)
        return now - self._reported.get(fault.step, math.inf) >= fault.delay

    def _strike(self, fault: Fault, now: float) -> bool:
        """Whether there was somebody to be hit."""
        assert self._process is not None
        target = self._target(fault.kind, fault.pick)
        if target is None:
            return False
        rank = rank_of(target) if fault.kind == "trainer" else 0
        stop = fault.action != "kill"
        if not self._send(target, signal.SIGSTOP if stop else signal.SIGKILL):
            return False
        self._hit = True
        if fault.kind == "trainer" and self.plan.ranks > 1:
            self.outcome.ranks.append(rank)
        if fault.action == "pause":
            self._later.append((now + fault.pause, target, signal.SIGCONT))
        elif fault.action == "stop" and fault.kind == "controller":
            self._later.append((now + fault.pause, target, signal.SIGKILL))
        return True

    def _target(self, kind: Kind, pick: float) -> psutil.Process | None:
        assert self._process is not None
        if kind == "controller":
            return psutil.Process(self._process.pid)
        self.census.take(self._process.pid)
        found = self.census.alive(kind)
        return found[int(pick * len(found))] if found else None

    # --- what it has come to ----------------------------------------------------------------------------------------

    def _steps(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.run / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def _sampling(self) -> bool:
        """Whether a group has been admitted."""
        with contextlib.suppress(FileNotFoundError):
            return any(path.stat().st_size > 0 for path in (self.run / "journal").glob("*.bin"))
        return False

    def _count(self) -> None:
        """Of every life what its log tells."""
        outcome = self.outcome
        said = "".join(path.read_text() for path in self.directory.glob("life-*.txt"))
        outcome.trainers = said.count("the trainer is lost")
        outcome.workers = said.count(" is given up")
        last = json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])
        outcome.moved = int(last["fleet/moved_answers"])
        outcome.kept = int(last["fleet/kept_tokens"])
        rows = [json.loads(line) for path in self.run.glob("rollouts/*") for line in path.read_text().splitlines()]
        outcome.no_verdict = sum(answer["reward"] is None for row in rows for answer in row["trajectories"])


def final_state(run: Path) -> dict[str, bytes]:
    """Of the trainer, after the last step."""
    return state_in(run / "checkpoints" / f"step-{STEPS:06d}")


def environment() -> dict[str, str]:
    """Of the command."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _write_inputs(plan: Plan, directory: Path) -> None:
    from fleuve.config.settings import DataSettings
    from fleuve.data.open import read_rows

    spec = "procedural:program" if plan.verifier == "code" else "procedural:chain"
    rows = itertools.islice(read_rows(spec, DataSettings(train=spec, verifier=plan.verifier)), PROMPTS)
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for _, row in rows))
    model = "small-code" if plan.verifier == "code" else "small"
    config = CONFIG.format(steps=STEPS, seed=plan.run_seed, model=model, verifier=plan.verifier)
    (directory / "config.toml").write_text(config)
