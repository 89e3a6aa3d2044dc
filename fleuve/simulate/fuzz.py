"""Schedule fuzzing: the production controller, gate, fleet, router and workflow in a world where things go wrong.

    python -m fleuve.simulate.fuzz --seeds 0..2000 [--processes 2]     many seeds; ends at the first that fails
    python -m fleuve.simulate.fuzz --seeds 1234                        one seed: its schedule, and what happened

A seed is a schedule (`faults.draw`); the same seed gives the same events in the same order, in any process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from fleuve.errors import UserError
from fleuve.simulate.clock import run_virtual
from fleuve.simulate.faults import Case, draw
from fleuve.simulate.leg import Leg
from fleuve.simulate.tries import ViolationError


@dataclass
class Outcome:
    """What came of one seed. `violation` is empty if every promise was kept."""

    case: Case
    violation: str = ""
    ended: list[str] = field(default_factory=list)  # a leg each: "done", "stopped", "cancelled", or the error
    dropped: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)  # what went wrong, and what came of it, by kind
    steps: int = 0
    restarts: int = 0
    kept_tokens: int = 0  # of answers that another worker went on with
    handed_on: int = 0  # tokens of running groups' answers that the second leg had from the first
    events: list[tuple[object, ...]] = field(default_factory=list)
    digest: str = ""
    virtual_seconds: float = 0.0

    def explain(self) -> str:
        """The schedule, the last things that happened, and how to see them again."""
        last = "\n".join(f"  {event}" for event in self.events[-40:])
        return (
            f"seed {self.case.seed}: {self.violation or 'every promise was kept'}\n"
            f"schedule:\n{self.case.describe()}\n"
            f"the last of {len(self.events)} events (digest {self.digest}):\n{last}\n"
            f"legs: {'; '.join(self.ended)}\n"
            f"again: python -m fleuve.simulate.fuzz --seeds {self.case.seed}"
        )


async def _play(case: Case, outcome: Outcome) -> None:
    leg = Leg(case)
    nothing = leg.save()
    try:
        await _run(leg, outcome)
        if case.resume and leg.controller.version < case.steps:
            saved = leg.checkpoints[-1] if leg.checkpoints else nothing
            first, leg = leg, Leg(case, leg, saved)
            leg.ledger.event("resumed", leg.ledger.start)
            outcome.handed_on = leg.handed_on
            given_up = saved.given_up if case.resume == "checkpoint" else first.given_up()
            await _run(leg, outcome)
            _check_both(first, leg, given_up)
    finally:
        outcome.events, outcome.digest = leg.ledger.events, leg.ledger.digest()
        outcome.seen = leg.ledger.seen
        outcome.steps = len(leg.ledger.trained)
        outcome.virtual_seconds = asyncio.get_running_loop().time()


async def _run(leg: Leg, outcome: Outcome) -> None:
    try:
        outcome.ended.append(await leg.run())
    finally:
        outcome.dropped += leg.controller.gate.dropped
        outcome.restarts += leg.fleet.restarts
        outcome.kept_tokens += leg.fleet.kept


def _check_both(first: Leg, second: Leg, given_up: set[str]) -> None:
    """Of what the last weights have seen, nothing is in them twice, and nothing was lost on the way."""
    start = second.ledger.start
    kept = [prompts for made, prompts in first.ledger.trained.items() if made <= start]
    trained = Counter(itertools.chain(*kept, *second.ledger.trained.values()))
    if twice := [prompt for prompt, times in trained.items() if times > 1]:
        raise ViolationError(f"prompts are trained twice across the resumption: {twice}")
    pending = {prompt.id for prompt in second.controller.pending()}
    if lost := second.source.served() - set(trained) - pending - given_up - second.given_up():
        raise ViolationError(f"prompts were lost in the resumption: {lost}")


def play(seed: int) -> Outcome:
    """Run the seed's schedule on virtual time."""
    outcome = Outcome(draw(seed))
    try:
        run_virtual(_play(outcome.case, outcome), seed)
    except Exception as error:
        outcome.violation = f"{type(error).__name__}: {error}"
    return outcome


def play_all(seeds: Iterable[int], processes: int = 1) -> Iterator[Outcome]:
    """The outcomes, in the order of the seeds."""
    if processes == 1:
        yield from map(play, seeds)
        return
    with multiprocessing.get_context("forkserver").Pool(processes, _leave_interrupts) as pool:
        yield from pool.imap(play, seeds, chunksize=50)


def _leave_interrupts() -> None:
    """Ctrl-C is for the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _until_interrupted(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    """`outcomes`, up to the one in which Ctrl-C came. In the middle of it, it would look like a fault of what runs on
    virtual time; whoever does not want to wait presses it twice.

    Raises:
        KeyboardInterrupt: it came.
    """
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for outcome in outcomes:
            yield outcome
            if came:
                raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _seeds(text: str) -> range:
    """`A..B` or one seed.

    Raises:
        UserError: it is neither.
    """
    first, dots, last = text.partition("..")
    if not first.isdecimal() or (dots and not last.isdecimal()):
        raise UserError(f"--seeds {text}: write 0..2000 for the seeds from 0 to 1999, or one seed, such as 1234")
    seeds = range(int(first), int(last) if dots else int(first) + 1)
    if not seeds:
        raise UserError(f"--seeds {text}: there is no seed in it; {first}..{int(first) + 1} is one, {first}")
    return seeds


def _processes(text: str) -> int:
    """How many.

    Raises:
        UserError: it is no number of processes.
    """
    if not text.isdecimal():
        raise UserError(f"--processes {text}: write how many, or 0 for one a core")
    return int(text) or os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code is 1 if a seed failed, 2 if it was asked for what cannot be, 130 after Ctrl-C."""
    parser = _Parser(prog="python -m fleuve.simulate.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", required=True, metavar="A..B", help="from A to B - 1, or one seed")
    parser.add_argument("--processes", default="1", metavar="N", help="0: one a core")
    try:
        args = parser.parse_args(arguments)
        seeds, processes = _seeds(args.seeds), _processes(args.processes)
        return _play_and_print(seeds, processes)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: no seed had failed", file=sys.stderr)
        return 130


def _play_and_print(seeds: range, processes: int) -> int:
    began = time.perf_counter()
    ends: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    steps, hours, done = 0, 0.0, 0
    for outcome in _until_interrupted(play_all(seeds, processes)):
        if outcome.violation or len(seeds) == 1:
            print(outcome.explain())
            return 1 if outcome.violation else 0
        done += 1
        ends.update(e.partition(":")[0] for e in outcome.ended)
        dropped += outcome.dropped
        steps, hours = steps + outcome.steps, hours + outcome.virtual_seconds / 3600
        if done % 5000 == 0:
            print(f"{done} seeds, {done / (time.perf_counter() - began):.0f} a second", flush=True)
    seconds = time.perf_counter() - began
    print(f"{done} seeds kept every promise, {done / seconds:.0f} a second: {steps} steps, {hours:.1f} virtual hours")
    print("ends:", ", ".join(f"{n} {end}" for end, n in ends.most_common()))
    print("groups dropped:", ", ".join(f"{n} {reason}" for reason, n in dropped.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
