"""Times of the engine's and the trainer's own code, by itself, with a number of threads on as many cores.

Both are measured in processes of their own, with the environment that the launcher gives to a run's. A process of one
thread is not alone: every core has one, as in a run, where all cores work at the same time.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleuve.config.settings import Settings
from fleuve.launch.engines import start_engine
from fleuve.launch.host import stop_all
from fleuve.launch.placement import Place, available_cpus
from fleuve.launch.process import thread_environment
from fleuve.rollout.client import EngineClient
from fleuve.simulate.calibrate import EngineStep
from fleuve.types import GenerationRequest, SamplingParams

NUMBERS = (1, 4, 16, 48, 96)
PROMPTS = (16, 128)
STEPS = 40
ROUNDS = 3
WAVE = 96
WAVES = 8


def engine_steps(config: str, threads: int, rounds: int = ROUNDS) -> list[EngineStep]:
    """Prefills and decode steps of `config`'s engine with 1 to 96 answers and short and long caches; the median of
    `rounds` times in each process."""
    found = _everywhere("engine", {"config": config, "rounds": rounds}, threads)
    return [EngineStep(**step) for steps in found for step in steps]


def trainer_times(run: Path, threads: int) -> dict[int, dict[str, float]]:
    """By step of the run: `time/update` and `time/proximal` of its batch, trained again."""
    times = _everywhere("trainer", {"run": str(run)}, threads, alone=True)[0]
    return {int(step): row for step, row in times.items()}


def request_seconds(settings: Settings, place: Place, measured: Mapping[str, float]) -> float:
    """What an engine loses over one request and its reply, beside its steps: `measured` says what these take. With the
    client's own work on other cores, if there are any."""
    return asyncio.run(_served(settings, place, measured))


async def _served(settings: Settings, place: Place, measured: Mapping[str, float]) -> float:
    rollout, tries = settings.rollout, []
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "engine.log"
        child = await start_engine("engine", settings.model.path, rollout, log, threads=place.threads, cpus=place.cpus)
        try:
            async with EngineClient("engine", child.url, 60.0, 60.0, child.token) as client:
                for number in range(WAVES):
                    requests = [_request(f"{number}/{i}", i // rollout.group_size, 16, 1) for i in range(WAVE)]
                    started = time.perf_counter()
                    await asyncio.gather(*map(client.generate, requests))
                    tries.append(time.perf_counter() - started)
        finally:
            await stop_all([child])
    tokens = 16 * -(-WAVE // rollout.group_size)
    steps = measured["decode_base"] + measured["decode_per_sequence"] * WAVE
    steps += measured["decode_per_kv_token"] * WAVE * 16
    steps += measured["prefill_base"] + measured["prefill_per_token"] * tokens
    return max(0.0, statistics.median(tries[1:]) - steps) / WAVE


def _request(name: str, number: int, prompt: int, answer: int) -> GenerationRequest:
    """Prompts of different numbers are not alike, or one would copy what another computed."""
    tokens = [3 + number % 32, 3 + number // 32, *(3 + i % 32 for i in range(prompt - 2))]
    sampling = SamplingParams(max_new_tokens=answer, seed=number, ignore_eos=True)
    return GenerationRequest(request_id=name, input_ids=tokens, sampling=sampling)


def _everywhere(what: str, options: dict[str, Any], threads: int, alone: bool = False) -> list[Any]:
    cpus = available_cpus()
    copies = 1 if alone else max(1, len(cpus) // threads)
    processes = []
    for i in range(copies):
        own = cpus[i * threads : (i + 1) * threads] or cpus
        argument = json.dumps({"what": what, "threads": threads, "cpus": own, **options})
        environment = os.environ | thread_environment(threads)
        processes.append(
            subprocess.Popen([sys.executable, __file__, argument], env=environment, stdout=subprocess.PIPE, text=True)
        )
    results = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"measuring the {what} failed, see above")
    return [json.loads(result.splitlines()[-1]) for result in results]


def _engine(config: str, rounds: int) -> list[dict[str, Any]]:
    from fleuve.config.loader import load_settings
    from fleuve.modeling.attention import NAME
    from fleuve.modeling.loading import DTYPES, load_model

    settings = load_settings(config)
    model = load_model(settings.model.path, DTYPES[settings.rollout.dtype], "cpu")
    model.set_attn_implementation(NAME)
    for number in (1, 16):
        _steps(model, number, 16)  # warms up
    found = []
    for number in NUMBERS:
        for prompt in PROMPTS:
            tries = [_steps(model, number, prompt) for _ in range(rounds)]
            for same in zip(*tries, strict=True):
                found.append(asdict(same[0]) | {"seconds": statistics.median(step.seconds for step in same)})
    return found


def _steps(model: Any, number: int, prompt: int) -> list[EngineStep]:
    """One step with `number` prompts, then decode steps; those in which memory grows are among them, as in a run."""
    from fleuve.engine.engine import Engine
    from fleuve.engine.scheduler import Limits

    engine = Engine(model, Limits(max_running=number, kv_cache_tokens=10**6, prefill_tokens=10**6, context=1024))
    for i in range(number):
        engine.add(_request(str(i), i, prompt, STEPS + 2))
    found = []
    for step in range(STEPS):
        before = engine.metrics()
        started = time.perf_counter()
        sampled = engine.step().sampled
        seconds = time.perf_counter() - started
        prefilled = int(engine.metrics()["tokens_prefilled"] - before["tokens_prefilled"])
        found.append(EngineStep(seconds, len(sampled), number * (prompt + step), prefilled))
    return found


def _trainer(run: str) -> dict[int, dict[str, float]]:
    from fleuve.config.loader import load_settings
    from fleuve.observe.rundir import RunDirectory
    from fleuve.train.trainer import Trainer
    from fleuve.weights.store import WeightStore

    directory = RunDirectory(Path(run))
    settings = load_settings(directory.config)
    files = sorted(directory.rollouts.glob("*.jsonl"))
    with tempfile.TemporaryDirectory() as scratch:
        store = WeightStore(Path(scratch) / "weights", 1)
        try:
            trainer = Trainer(settings, store)
            found = {}
            for step, file in enumerate(files, start=1):
                metrics = trainer.step(_batch(file, step - 1)).metrics
                found[step] = {name: metrics[name] for name in ("time/update", "time/proximal")}
            return found
        finally:
            store.close()


def _batch(file: Path, version: int) -> Any:
    """The batch of a step, its answers as they were but for their versions, which are all the trainer's."""
    import numpy as np

    from fleuve.types import Batch, Group, Prompt, Trajectory

    groups = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = Prompt(id=row["prompt_id"], input_ids=row["prompt_ids"], text=row["prompt"], answer=row["answer"])
        trajectories = [
            Trajectory(
                prompt_ids=np.asarray(row["prompt_ids"], np.int32),
                output_ids=np.asarray(t["output_ids"], np.int32),
                logprobs=np.asarray(t["logprobs"], np.float32),
                versions=np.full(len(t["output_ids"]), version, np.int32),
                loss_mask=np.asarray(t["loss_mask"], np.bool_),
                finish_reason=t["finish_reason"],
                reward=t["reward"],
                excluded=t["excluded"],
            )
            for t in row["trajectories"]
        ]
        groups.append(Group(id=row["group"], prompt=prompt, trajectories=trajectories, admitted_version=version))
    return Batch(version=version, groups=groups)


def main(argument: str) -> None:
    """In the child: measure and print JSON."""
    options = json.loads(argument)
    os.sched_setaffinity(0, options["cpus"])
    import torch

    torch.set_num_threads(options["threads"])
    if options["what"] == "engine":
        found: Any = _engine(options["config"], options["rounds"])
    else:
        found = _trainer(options["run"])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
