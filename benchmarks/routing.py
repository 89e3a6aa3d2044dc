"""Routing of groups to rollout workers: tokens in flight with back-pressure, against simpler ways.

    python benchmarks/routing.py [--quick]

On virtual time, with the production controller, fleet and router; a policy is put in the router's place, all else is
the same: the prompts, the lengths of the answers (by seed), the cost models (a 1.5B model on one H800 an engine, the
trainer so fast that only generation counts). Lengths are log-normal (sigma 1.2), half of the variance the prompt's. The
caches are roomy (every answer fits at its longest); or tight, with room for a fifth of the answers, half of those that
ever run at the same time; or uneven: as tight, and every fourth worker has half of it.

Prompts have 256 tokens each; or they are mixed, and one in eight has 6,144, as where some questions come with a text.

Policies, from the simplest on:
- random; round robin;
- by group: fewest answers in flight, given back when their whole group has ended;
- by answer: fewest answers in flight, each given back when it ends;
- by tokens: fewest expected tokens in flight;
- pressure: the same, and none to a worker with a full cache while another has room.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from _report import report

from fleuve.config.settings import Settings
from fleuve.control import fleet as fleet_module
from fleuve.control.router import Router, Seat
from fleuve.control.worker import Life
from fleuve.simulate import run as run_module
from fleuve.simulate.engine import SimulatedEngine
from fleuve.simulate.engine_costs import EngineCosts
from fleuve.simulate.result import SimulationResult
from fleuve.simulate.source import SimulatedSource
from fleuve.types import Prompt

LONGEST, MEAN, PROMPT, GROUP_SIZE = 8192, 900, 256, 16
DOCUMENT, DOCUMENTS = 6144, 8
"""Tokens of a long prompt, and how many prompts there are to one."""
TIGHT = 0.2
"""A tight cache, as a share of what the answers that a worker is asked for come to in the mean."""
GROUPS_A_WORKER = 4
"""Of each training step; there are as many again for each step of staleness."""


class Tokens(Router[Life]):
    """By tokens, deaf to pressure."""

    def press(self, worker: Life, pressed: bool) -> None: ...


class ByAnswer(Tokens):
    """Every answer weighs the same."""

    def take(self, answers: int, tokens: int) -> Seat[Life]:
        return super().take(answers, 1)


class ByGroup(ByAnswer):
    """And weighs until its group has ended."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._ended: dict[Seat[Life], int] = {}

    def give_back(self, seat: Seat[Life], answers: int) -> None:
        self._ended[seat] = self._ended.get(seat, 0) + answers
        if self._ended[seat] == seat.answers:
            super().give_back(seat, self._ended.pop(seat))


class Chosen(Tokens):
    """One that does not look at loads."""

    def choose(self) -> Life:
        """The next one."""
        return self._random.choice(list(self._open))

    def take(self, answers: int, tokens: int) -> Seat[Life]:
        seat = Seat(self.choose(), 0, 1)
        self.add(seat, answers)
        return seat


class RoundRobin(Chosen):
    """In turn."""

    _turn = -1

    def choose(self) -> Life:
        self._turn += 1
        workers = list(self._open)
        return workers[self._turn % len(workers)]


POLICIES: dict[str, Callable[[int], Router[Life]]] = {
    "random": Chosen,
    "round robin": RoundRobin,
    "by group": ByGroup,
    "by answer": ByAnswer,
    "by tokens": Tokens,
    "pressure": Router,
}
BASE = "by group"


class Mixed(SimulatedSource):
    """Some prompts are long; which, is a matter of their number alone."""

    def next(self) -> Prompt:
        prompt = super().next()
        if random.Random(prompt.id).random() * DOCUMENTS < 1:
            tokens = np.zeros(DOCUMENT, np.int32)
            tokens[0] = prompt.input_ids[0]
            prompt = msgspec.structs.replace(prompt, input_ids=tokens)
        return prompt


class Uneven(SimulatedEngine):
    """Every fourth engine has half the cache."""

    def __init__(self, name: str, times: EngineCosts, *args: Any, **kwargs: Any) -> None:
        if int(name.rpartition("-")[2]) % 4 == 0:
            times = replace(times, kv_capacity_tokens=times.kv_capacity_tokens // 2)
        super().__init__(name, times, *args, **kwargs)


@dataclass(frozen=True)
class Case:
    """One world."""

    workers: int
    caches: str
    mixed: bool
    eta: int = 2


@contextmanager
def routed_by(policy: Callable[[int], Router[Life]], case: Case) -> Iterator[None]:
    """Fleets route so, in simulations of such a world."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(fleet_module, "Router", policy))
        if case.caches == "uneven":
            stack.enter_context(mock.patch.object(run_module, "SimulatedEngine", Uneven))
        if case.mixed:
            stack.enter_context(mock.patch.object(run_module, "SimulatedSource", Mixed))
        yield


def run_of(case: Case, steps: int, seed: int) -> Settings:
    """Rollout-bound."""
    workers, eta = case.workers, case.eta
    answers = GROUPS_A_WORKER * GROUP_SIZE * (eta + 1)  # of a worker, in flight
    prompt = PROMPT + (DOCUMENT - PROMPT) / DOCUMENTS * case.mixed
    cache = answers * float(DOCUMENT + LONGEST)
    if case.caches != "roomy":
        cache = max(TIGHT * answers * (prompt + MEAN), 2.0 * (DOCUMENT + LONGEST))
    return Settings.model_validate(
        {
            "run_dir": "unused",
            "steps": steps + eta + 20,
            "seed": seed,
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {
                "group_size": GROUP_SIZE,
                "max_new_tokens": LONGEST,
                "workers": workers,
                "dtype": "bfloat16",
                "max_running": answers * 4,
                "request_timeout": 1e6,
            },
            "control": {
                "batch_size": GROUPS_A_WORKER * workers,
                "max_staleness": eta,
                "overdue": "train",
                "group_timeout": 1e6,
            },
            "trainer": {"dtype": "bfloat16", "token_budget": 32768},
            "simulate": {
                "model": "qwen-1.5b",
                "hardware": "h800",
                "prompt_tokens": PROMPT,
                "kv_cache_tokens": round(cache),
                "seed": seed,
                "steps": steps + eta + 4,
                "lengths": {"mean": MEAN, "sigma": 1.2},
                "measured": {
                    "train_per_token": 1e-9,
                    "forward_per_token": 1e-9,
                    "train_per_micro_batch": 0.0,
                    "step": 0.1,
                    "publish": 0.1,
                },
            },
        }
    )


def compare(case: Case, steps: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row a policy; ratios are to `BASE` with the same seed, their median with the smallest and largest."""
    results = {name: [_one(policy, case, steps, seed) for seed in seeds] for name, policy in POLICIES.items()}
    rows = []
    for name, found in results.items():
        pairs = zip(found, results[BASE], strict=True)
        ratios = [one.trained_tokens_per_second / base.trained_tokens_per_second for one, base in pairs]
        mean = lambda what, found=found: statistics.mean(map(what, found))  # noqa: E731
        rows.append(
            {
                "workers": case.workers,
                "caches": case.caches,
                "prompts": "mixed" if case.mixed else "alike",
                "eta": case.eta,
                "policy": name,
                "tokens_per_second": mean(lambda r: r.trained_tokens_per_second),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "preemptions": mean(lambda r: r.preemptions),
                "idle": mean(lambda r: r.rollout["idle"]),
                "group_seconds": mean(lambda r: r.group_seconds),
                "staleness_max": max(r.staleness_max for r in found),
            }
        )
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, file=sys.stderr, flush=True)
    return rows


def _one(policy: Callable[[int], Router[Life]], case: Case, steps: int, seed: int) -> SimulationResult:
    with routed_by(policy, case):
        return run_module.simulate(run_of(case, steps, seed), warmup=case.eta + 4)


def seconds_of_a_choice(workers: int, times: int = 2000) -> float:
    """Of this process's time, for a group to be seated and its answers to end."""
    router: Router[int] = Router(0)
    for worker in range(workers):
        router.join(worker)
    seats = [router.take(GROUP_SIZE, 100 + i % 7) for i in range(4 * workers)]
    began = time.perf_counter()
    for i in range(times):
        seat = seats[i % len(seats)]
        for _ in range(GROUP_SIZE):
            router.give_back(seat, 1)
        seats[i % len(seats)] = router.take(GROUP_SIZE, 100 + i % 7)
    return (time.perf_counter() - began) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 workers, few steps; ends within a minute")
    args = parser.parse_args()
    if args.quick:
        cases, steps, seeds = [Case(8, caches, True) for caches in ("tight", "uneven")], 3, range(1)
    else:
        worlds = [("roomy", False), ("tight", False), ("tight", True), ("uneven", True)]
        cases = [*(Case(8, *world) for world in worlds), Case(64, "tight", True)]
        steps, seeds = 10, range(4)
    rows = [row for case in cases for row in compare(case, steps, seeds if case.workers < 64 else seeds[:1])]
    headline: dict[str, Any] = {"base": BASE}
    for world in dict.fromkeys((row["caches"], row["prompts"]) for row in rows):
        found = [row for row in rows if (row["caches"], row["prompts"]) == world]
        headline[", ".join(world)] = {
            policy: round(statistics.geometric_mean([r["ratio"] for r in found if r["policy"] == policy]), 3)
            for policy in POLICIES
        }
    headline["us_a_group_with_512_workers"] = round(seconds_of_a_choice(512) * 1e6, 1)
    report("routing", headline, rows)


if __name__ == "__main__":
    main()
