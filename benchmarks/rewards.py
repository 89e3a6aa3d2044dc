"""Checks a second for maths and code, and what checks in flight cost an engine beside them.

Throughput: the pool with a worker for each core of this machine, right and wrong answers in equal parts, all of them in
its queue at once, `--rounds` times. Maths has integers, fractions and expressions in turn; code has small functions
with three assertions, each check with two sandboxes of its own. Every score is compared with what it has to be.

Beside an engine: one process generates on a core of its own without end, with SmolLM2's shape, 64 requests at a time.
The other core has in turn nothing to do, a plain endless loop (what two busy cores cost each other on this
machine, whatever they do) and 1,000 code checks in flight of which a tenth hang, half of them asleep and half in an
endless loop. Tokens a second on the clock and a CPU second of the engine's; a ratio is taken within each round.

    python benchmarks/rewards.py [--quick] [--rounds N]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any, NamedTuple

from _report import report, spread

from fleuve.config.settings import CodeSettings, RewardSettings
from fleuve.rewards.pool import RewardPool
from fleuve.types import Prompt, Verdict

CORES = sorted(os.sched_getaffinity(0))
LIMITS = CodeSettings(seconds=2.0, cpu_seconds=1.0)
"""Of the checks beside the engine: half the defaults, because a hundred programs hang."""
DEADLINE = 5.0
WORKERS_BESIDE = 4
RUNNING = 64


class Job(NamedTuple):
    """A check, the score that it has to have, and what kind of check it is."""

    prompt: Prompt
    text: str
    score: float
    kind: str


def maths(count: int) -> list[Job]:
    """Integers, fractions and expressions in turn, every other one wrong."""
    rng, jobs = random.Random(0), []
    for i in range(count):
        a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 99)
        wrong = i % 2
        match i // 2 % 3:
            case 0:
                kind, answer, given = "integer", str(a * b + c), f"{a * b + c + wrong:,}"
            case 1:
                value = Fraction(a, b) + Fraction(wrong, c)
                kind, answer, given = "fraction", rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{value.numerator * 3}}}"
                given += f"{{{value.denominator * 3}}}"
            case _:
                kind = "expression"
                answer = rf"x^2 + {b + c}x + {b * c} + \sqrt{{{a * a * 2}}}"
                given = rf"(x + {b})(x + {c}) + {a + wrong}\sqrt{{2}}"
        prompt = Prompt(id=str(i), input_ids=[1], text="", answer=answer, verifier="math")
        text = rf"First I multiply {a} and {b}, then I look at {c}. So the answer is $\boxed{{{given}}}$."
        jobs.append(Job(prompt, text, float(not wrong), kind))
    return jobs


_TASKS = (
    ("def f(n):\n    return sum(i for i in range(n) if i % 3 == 0 or i % 5 == 0)", ("10", "23"), ("50", "543")),
    (
        "def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
        ("10", "55"),
        ("1", "1"),
    ),
    ("def f(s):\n    return ' '.join(reversed(s.split()))", ("'a b c'", "'c b a'"), ("'x'", "'x'")),
    ("def f(xs):\n    return sorted(set(xs))", ("[3, 1, 3]", "[1, 3]"), ("[]", "[]")),
    ("def f(n):\n    return n > 1 and all(n % d for d in range(2, n))", ("97", "True"), ("91", "False")),
)


def code(count: int, hanging: float = 0.0) -> list[Job]:
    """Small functions, every other one wrong at the third assertion; a share of them hang."""
    rng, jobs = random.Random(0), []
    for i in range(count):
        source, *pairs = _TASKS[i // 2 % len(_TASKS)]
        tests = [f"assert f({given}) == {result}" for given, result in pairs]
        kind, score = ("right", 1.0) if i % 2 == 0 else ("wrong", 0.0)
        tests.append(f"assert f({pairs[0][0]}) {'==' if score else '!='} {pairs[0][1]}")
        if i < round(count * hanging):
            kind, score = ("sleeps", 0.0) if i % 2 == 0 else ("spins", 0.0)
            source = "def f(x):\n    import time\n    time.sleep(1e6)" if kind == "sleeps" else "while True:\n    pass"
        prompt = Prompt(id=str(i), input_ids=[1], text="", answer="", verifier="code", row={"tests": tests})
        jobs.append(Job(prompt, f"I would write\n```python\n{source}\n```\n", score, kind))
    rng.shuffle(jobs)
    return jobs


async def check(pool: RewardPool, jobs: list[Job]) -> tuple[float, list[Verdict]]:
    """Seconds, and verdicts in the order of the jobs, which are in the queue all at once."""
    started = time.perf_counter()
    verdicts = await asyncio.gather(*(pool.score(job.prompt, job.text) for job in jobs))
    taken = time.perf_counter() - started
    for job, verdict in zip(jobs, verdicts, strict=True):
        if verdict.score is not None and verdict.score != job.score:
            raise RuntimeError(f"a {job.kind} answer scored {verdict.score}: {job.text!r}")
    return taken, list(verdicts)


async def throughput(verifier: str, jobs: list[Job], rounds: int) -> list[dict[str, Any]]:
    """Rows of the table: all together, and each kind. The pool has a worker for each core."""
    settings = RewardSettings(workers=len(CORES), deadline=30.0, queue_size=len(jobs))
    rates: list[float] = []
    all_verdicts: list[tuple[Job, Verdict]] = []
    async with RewardPool(settings, [verifier]) as pool:
        await check(pool, jobs[: 10 * len(CORES)])
        for _ in range(rounds):
            taken, verdicts = await check(pool, jobs)
            rates.append(len(jobs) / taken)
            all_verdicts += zip(jobs, verdicts, strict=True)
    rows = [cost(verifier, [v for _, v in all_verdicts]) | rate_of("checks", rates)]
    for kind in dict.fromkeys(job.kind for job in jobs):
        rows.append(cost(f"{verifier}: {kind}", [v for job, v in all_verdicts if job.kind == kind]))
    return rows


def cost(name: str, verdicts: list[Verdict]) -> dict[str, Any]:
    """A row of the table: what checks took, once a worker had taken them up."""
    milliseconds = [1000 * verdict.seconds for verdict in verdicts]
    row: dict[str, Any] = {"what": name, "a second": "", "min": "", "max": "", "unit": ""}
    row |= {"ms a check, mean": statistics.fmean(milliseconds), "median": statistics.median(milliseconds)}
    return row | {"longest": max(milliseconds), "no verdict": sum(v.score is None for v in verdicts)}


def rate_of(unit: str, rates: list[float]) -> dict[str, Any]:
    """The columns of a rate."""
    found = spread(rates)
    return {"a second": found["median"], "min": found["min"], "max": found["max"], "unit": unit}


# Beside an engine


def generate(core: int, layers: int, parent: int, seen: SynchronizedArray[float]) -> None:
    """Generate without end; `seen` gets the tokens and the CPU seconds so far. A process of its own."""
    import torch
    from engine import SMOLLM2

    from fleuve.engine.engine import Engine
    from fleuve.engine.linear import pack_linears
    from fleuve.engine.scheduler import Limits
    from fleuve.modeling.attention import NAME
    from fleuve.modeling.loading import build_model
    from fleuve.types import GenerationRequest, SamplingParams

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model(SMOLLM2 | {"num_hidden_layers": layers}, torch.bfloat16).eval()
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    pack_linears(model)
    engine = Engine(model, Limits(max_running=RUNNING, kv_cache_tokens=65536, prefill_tokens=4096, context=8192))
    rng, number, running, ended = random.Random(0), 0, 0, 0
    while os.getppid() == parent:
        while running < RUNNING:
            # The first ones end one after another, so that from then on the load is even.
            length = 2 + number if number < RUNNING else RUNNING
            ids = [rng.randrange(3, 49152) for _ in range(32)]
            sampling = SamplingParams(max_new_tokens=length, seed=number, ignore_eos=True)
            engine.add(GenerationRequest(request_id=str(number), input_ids=ids, sampling=sampling))
            number, running = number + 1, running + 1
        done = engine.step().ended
        running -= len(done)
        ended += sum(len(c.output_ids) for c in done)  # type: ignore[union-attr,misc]
        with seen.get_lock():
            seen[0], seen[1] = float(ended), time.process_time()


class Speed(NamedTuple):
    """Of the engine, in some stretch of time."""

    tokens: float
    seconds: float
    cpu: float

    @property
    def on_clock(self) -> float:
        return self.tokens / self.seconds

    @property
    def per_cpu(self) -> float:
        return self.tokens / self.cpu


class Watch:
    """The engine's speed from its making to `stop`."""

    def __init__(self, seen: SynchronizedArray[float]) -> None:
        self._seen = seen
        self._from = self._now()

    def stop(self) -> Speed:
        return Speed(*(b - a for a, b in zip(self._from, self._now(), strict=True)))

    def _now(self) -> tuple[float, float, float]:
        with self._seen.get_lock():
            return self._seen[0], time.perf_counter(), self._seen[1]


@contextlib.contextmanager
def engine_on(core: int, layers: int) -> Iterator[SynchronizedArray[float]]:
    """An engine that generates; yields once it does so evenly."""
    context = multiprocessing.get_context("spawn")
    seen: SynchronizedArray[float] = context.Array("d", 2)
    process = context.Process(target=generate, args=(core, layers, os.getpid(), seen), daemon=True)
    process.start()
    try:
        give_up = time.monotonic() + 120.0
        while seen[0] < 2 * RUNNING * RUNNING:
            if not process.is_alive() or time.monotonic() > give_up:
                raise RuntimeError("the engine did not get going")
            time.sleep(0.1)
        yield seen
    finally:
        process.kill()
        process.join(10.0)


@contextlib.contextmanager
def endless_loop() -> Iterator[None]:
    """Keeps the core of this process busy."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait(10.0)


async def beside(
    layers: int, jobs: list[Job], rounds: int, quiet: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows for the table, and the figures for the headline."""
    os.sched_setaffinity(0, {CORES[-1]})
    speeds: dict[str, list[Speed]] = {"nothing": [], "an endless loop": [], "checks": []}
    verdicts: list[tuple[Job, Verdict]] = []
    settings = RewardSettings(workers=WORKERS_BESIDE, deadline=DEADLINE, queue_size=len(jobs), code=LIMITS)
    with engine_on(CORES[0], layers) as seen:
        async with RewardPool(settings, ["code"]) as pool:
            await check(pool, code(20))
            for _ in range(rounds):
                watch = Watch(seen)
                await asyncio.sleep(quiet)
                before = watch.stop()
                with endless_loop():
                    watch = Watch(seen)
                    await asyncio.sleep(quiet)
                    speeds["an endless loop"].append(watch.stop())
                watch = Watch(seen)
                _, given = await check(pool, jobs)
                speeds["checks"].append(watch.stop())
                verdicts += zip(jobs, given, strict=True)
                watch = Watch(seen)
                await asyncio.sleep(quiet)
                after = watch.stop()  # the machine may drift: half of the idle time before and half after
                speeds["nothing"].append(Speed(*(a + b for a, b in zip(before, after, strict=True))))
    os.sched_setaffinity(0, CORES)
    rows: list[dict[str, Any]] = []
    headline: dict[str, Any] = {}
    for name, measured in speeds.items():
        rows.append({"what": f"engine beside {name}"} | rate_of("tokens", [s.on_clock for s in measured]))
        if name != "nothing":
            headline |= _ratios(f"engine_beside_{name.split()[-1]}", measured, speeds["nothing"])
    headline["seconds_for_the_checks"] = statistics.median(s.seconds for s in speeds["checks"])
    for kind in ("right", "wrong", "sleeps", "spins"):
        rows.append(cost(f"beside the engine: {kind}", [v for job, v in verdicts if job.kind == kind]))
    return rows, headline


def _ratios(name: str, measured: list[Speed], alone: list[Speed]) -> dict[str, Any]:
    """Of the engine's speed to its speed alone, by the clock and by its CPU time."""
    clock = [s.on_clock / n.on_clock for s, n in zip(measured, alone, strict=True)]
    cpu = [s.per_cpu / n.per_cpu for s, n in zip(measured, alone, strict=True)]
    figures: dict[str, Any] = {name: statistics.median(clock), f"{name}_spread": [min(clock), max(clock)]}
    return figures | {f"{name}_by_cpu": statistics.median(cpu), f"{name}_by_cpu_spread": [min(cpu), max(cpu)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer checks and a smaller model, within a minute")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    options = parser.parse_args()
    quick = options.quick
    if len(CORES) < 2:
        parser.error("two cores are needed, one for the engine and one for the checks")
    rounds = options.rounds or (1 if quick else 3)
    maths_rows = asyncio.run(throughput("math", maths(300 if quick else 3000), rounds))
    code_rows = asyncio.run(throughput("code", code(50 if quick else 400), rounds))
    jobs = code(60 if quick else 1000, hanging=0.1)
    beside_rows, figures = asyncio.run(beside(6 if quick else 30, jobs, rounds, 4.0 if quick else 15.0))
    longest = {row["what"]: row["longest"] for row in beside_rows if "longest" in row}
    headline = {
        "maths_checks_per_second": maths_rows[0]["a second"],
        "code_checks_per_second": code_rows[0]["a second"],
        "workers": len(CORES),
        **figures,
        "checks_in_flight": len(jobs),
        "hanging": 0.1,
        "limits": {"seconds": LIMITS.seconds, "cpu_seconds": LIMITS.cpu_seconds, "deadline": DEADLINE},
        "longest_sleeping_ms": longest["beside the engine: sleeps"],
        "longest_spinning_ms": longest["beside the engine: spins"],
        "model": "SmolLM2's shape, 6 layers" if quick else "SmolLM2-135M, random weights",
        "rounds": rounds,
    }
    report("rewards", headline, maths_rows + code_rows + beside_rows)


if __name__ == "__main__":
    main()
