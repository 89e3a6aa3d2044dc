"""How many answers one controller process can bring in a second, with 50,000 in flight; and whether its memory grows.

    python benchmarks/controller.py [--quick]

The controller, gate, fleet, router and `SingleTurn` are the real ones, on real time, in this process; in the second
part so are the HTTP clients, against two server processes. Engines, rewards and trainer are simulated and as cheap as
can be: an answer is a timer, and arrays that take no memory. Answers take a time drawn uniformly around its mean, such
that the engines bring more answers than the controller is asked for. Figures are per second of the clock, and of CPU
time of the controller's process: this machine may be busy with other things, and a core is what a controller can use.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import numpy as np
from _report import report
from _timer_engine import TimerEngine

from fleuve.config.settings import Settings
from fleuve.contracts import RolloutEngine
from fleuve.control.controller import Controller
from fleuve.control.fleet import Fleet
from fleuve.control.gate import State
from fleuve.rollout.client import EngineClient
from fleuve.rollout.workflow import SingleTurn
from fleuve.types import (
    Batch,
    Prompt,
    StepResult,
    Verdict,
    WeightFile,
)

GROUP_SIZE = 16


class Source:
    def __init__(self) -> None:
        self._next = 0

    def next(self) -> Prompt:
        self._next += 1
        return Prompt(id=f"e0/{self._next}", input_ids=[1] * 64, text="", answer="")

    def give_back(self, prompt: Prompt) -> None:
        raise RuntimeError(f"a group of {prompt.id} was dropped")

    def state(self) -> dict[str, object]:
        return {}

    def restore(self, state: dict[str, object]) -> None: ...


class Rewarder:
    async def score(self, prompt: Prompt, text: str) -> Verdict:
        return Verdict(score=1.0)


class Trainer:
    """Takes `seconds` a step."""

    def __init__(self, seconds: float) -> None:
        self.version = 0
        self._seconds = seconds

    async def step(self, batch: Batch) -> StepResult:
        await asyncio.sleep(self._seconds)
        self.version += 1
        return StepResult(
            version=self.version,
            metrics={"tokens/trained": 1.0},
            advantages=[[0.0] * len(group.trajectories) for group in batch.groups],
            trained=[group.id for group in batch.groups],
        )

    async def interrupt(self) -> None: ...

    async def publish(self, served: int) -> WeightFile:
        return WeightFile(version=self.version, path="", bytes=0, checksum="")

    async def save(self, path: Path) -> None: ...

    async def load(self, path: Path) -> None: ...


class Observer:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def step(self, metrics: dict[str, float], batch: Batch) -> None: ...

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None: ...

    def count(self, name: str, value: float, at: float) -> None: ...

    def activity(self, who: str, what: str) -> None: ...

    def note(self, message: str) -> None:
        self.notes.append(message)


def resident_mb() -> float:
    """Memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Probe:
    """What was seen once a second, after the warm-up."""

    def __init__(self, fleet: Fleet, controller: Controller) -> None:
        self._fleet, self._controller = fleet, controller
        self._rows: list[tuple[float, float, int, int, float]] = []
        self._worst_lag = 0.0

    async def run(self, warm_up: float, seconds: float) -> None:
        await asyncio.sleep(warm_up)
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            in_flight = sum(self._fleet.router.in_flight.values())
            self._rows.append((now, time.process_time(), self._finished(), in_flight, resident_mb()))
            await asyncio.sleep(0.5)
            self._worst_lag = max(self._worst_lag, time.perf_counter() - now - 0.5)

    def _finished(self) -> int:
        """Answers of the groups that have been finished so far."""
        gate = self._controller.gate
        return (gate.trained + gate.count(State.READY) + gate.count(State.STEPPING)) * GROUP_SIZE

    def figures(self) -> dict[str, float]:
        """Rates, and the slope of memory by least squares."""
        (t0, cpu0, n0, *_), (t1, cpu1, n1, *_) = self._rows[0], self._rows[-1]
        times, memory = np.array([row[0] - t0 for row in self._rows]), np.array([row[4] for row in self._rows])
        in_flight = [row[3] for row in self._rows]
        return {
            "answers_per_second": (n1 - n0) / (t1 - t0),
            "answers_per_cpu_second": (n1 - n0) / (cpu1 - cpu0),
            "cpu_us_per_answer": (cpu1 - cpu0) / (n1 - n0) * 1e6,
            "in_flight_mean": sum(in_flight) / len(in_flight),
            "in_flight_min": float(min(in_flight)),
            "rss_mb_first": float(memory[0]),
            "rss_mb_last": float(memory[-1]),
            "rss_mb_per_minute": float(np.polyfit(times, memory, 1)[0]) * 60,
            "worst_lag_seconds": self._worst_lag,
            "seconds": t1 - t0,
        }


def settings_for(in_flight: int, workers: int, batch_size: int) -> Settings:
    """As many slots as keep `in_flight` answers running beside the batches that wait, are trained, and are served, and
    beside those that have ended and wait for the others of their group (a third more)."""
    slots = in_flight * 4 // 3 // GROUP_SIZE + 4 * batch_size
    return Settings.model_validate(
        {
            "run_dir": "unused",
            "steps": 10**9,
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {"group_size": GROUP_SIZE, "workers": workers, "max_new_tokens": 100_000},
            "control": {"batch_size": batch_size, "max_staleness": -(-slots // batch_size) - 1},
        }
    )


async def measure(
    engines: Sequence[RolloutEngine], in_flight: int, rate: float, batch_size: int, seconds: float
) -> dict[str, float]:
    """Run a controller for `seconds`, after a warm-up, on these engines: with `in_flight` answers they bring `rate` of
    them a second, if it lets them. A step takes the trainer a third of the time in which its batch is generated."""
    settings = settings_for(in_flight, len(engines), batch_size)
    fleet = Fleet(engines, seed=0)
    controller = Controller(
        settings,
        Source(),
        SingleTurn(settings.rollout, 0, lambda ids: "", Rewarder()),
        fleet,
        Trainer(batch_size * GROUP_SIZE / rate / 3),
        Observer(),
    )
    probe = Probe(fleet, controller)
    run = asyncio.create_task(controller.run())
    watch = asyncio.create_task(probe.run(2.0 * in_flight / rate, seconds))
    done, _ = await asyncio.wait([run, watch], return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    run.cancel()
    await asyncio.wait([run])
    if run in done:
        run.result()
    return probe.figures()


async def in_process(in_flight: int, rate: float, seconds: float) -> dict[str, float]:
    """Engines in this process: what an answer costs the controller itself."""
    engines = [TimerEngine(seed, in_flight / rate, tokens=1000) for seed in range(64)]
    return await measure(engines, in_flight, rate, 256, seconds)


async def over_http(urls: Sequence[str], in_flight: int, rate: float, seconds: float) -> dict[str, float]:
    """Engines in other processes, through the real clients: each answer in flight is a connection."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                EngineClient(f"worker-{i}", url, request_timeout=120.0, update_timeout=60.0)
            )
            for i, url in enumerate(urls)
        ]
        return await measure(engines, in_flight, rate, 16, seconds)


@contextmanager
def servers(count: int, seconds: float, tokens: int) -> Iterator[list[str]]:
    """Processes whose engines take `seconds` for an answer of `tokens`; their addresses."""
    with ExitStack() as stack:
        urls = []
        for seed in range(count):
            program = Path(__file__).with_name("_controller_server.py")
            command = [sys.executable, str(program), str(seed), str(seconds), str(tokens)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(end, process)
            assert process.stdout is not None
            urls.append(f"http://127.0.0.1:{int(process.stdout.readline())}")
        yield urls


def end(process: subprocess.Popen[str]) -> None:
    """Its standard input ends, and so does it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter; ends within a minute")
    args = parser.parse_args()
    seconds, connections = (8.0, 1000) if args.quick else (60.0, 2000)
    rows: list[dict[str, object]] = []
    direct = asyncio.run(in_process(50_000, 5000.0, seconds))
    rows.append({"engines": "in this process", "tokens": 1000, **direct})
    lengths = (1000,) if args.quick else (100, 1000, 4000)
    wire = {}
    for tokens in lengths:
        rate = connections / (8 if tokens > 1000 else 4)
        with servers(2, connections / rate, tokens) as urls:
            wire[tokens] = asyncio.run(over_http(urls, connections, rate, max(8.0, seconds / 2)))
        rows.append({"engines": "two processes, HTTP", "tokens": tokens, **wire[tokens]})
    headline = {
        "answers_per_second": direct["answers_per_second"],
        "in_flight": direct["in_flight_mean"],
        "cpu_us_per_answer": direct["cpu_us_per_answer"],
        "rss_mb": direct["rss_mb_last"],
        "rss_mb_per_minute": direct["rss_mb_per_minute"],
        **{f"cpu_us_per_answer_http_{tokens}_tokens": figures["cpu_us_per_answer"] for tokens, figures in wire.items()},
    }
    report("controller", headline, rows)


if __name__ == "__main__":
    main()
