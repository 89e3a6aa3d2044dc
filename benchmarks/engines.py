"""Useful tokens a second by the number of concurrent requests: the embedded engine, vLLM, transformers' `generate`.

    python benchmarks/engines.py [--quick] [--model PATH] [--dtype bfloat16|float32] [--rounds N] [--share N]
                                 [--engines embedded,vllm,vllm-compiled,generate]

The same model, prompts, lengths and dtype; one core for whoever computes, another one for whoever asks, if there are 2.
The engines are servers, asked over HTTP as in a run: so many requests are kept in flight, a new one sent when one ends.
`generate` takes them in batches of so many, in the same order. Lengths are forced, log-normal (sigma 0.8, 8 to 256
tokens); what was asked for counts, padding does not. An engine runs alone: vLLM's process takes a whole core even when
it has nothing to do. Figures are by the clock, so the machine has to be quiet.

Without `--model` it is SmolLM2-135M-Instruct where `fleuve fetch smollm2` has put it, in bf16 where this CPU multiplies
that by itself, else in fp32; with `--quick` the small model in fp32. vLLM takes part where `make vllm` has set it up:
eager, and compiled (`vllm-compiled`; some minutes to start).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _report import machine, report, spread

from fleuve.config.models import inspect_model, resolve_model
from fleuve.config.settings import RolloutSettings
from fleuve.config.vllm import VllmSettings
from fleuve.contracts import RolloutEngine
from fleuve.errors import UserError
from fleuve.launch.engines import start_engine
from fleuve.launch.kinds import KINDS
from fleuve.launch.placement import available_cpus
from fleuve.launch.process import thread_environment
from fleuve.types import GenerationRequest, SamplingParams

ENGINES = ("embedded", "vllm", "vllm-compiled", "generate")
CONCURRENT = (1, 8, 32, 64)
PROMPT_TOKENS = 64
SHORTEST, MEDIAN, LONGEST, SIGMA = 8, 64, 256, 0.8
REQUESTS = {1: 4, 8: 24, 32: 96, 64: 192}
"""Of one measurement, by how many of them are in flight."""


@dataclass(frozen=True)
class Load:
    """What is asked of every engine."""

    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def of(cls, requests: int, vocabulary: int, longest: int) -> Load:
        """The same for the same arguments; lengths at evenly spaced quantiles, in random order."""
        rng, normal = random.Random(requests), statistics.NormalDist()
        drawn = [MEDIAN * math.exp(SIGMA * normal.inv_cdf((i + 0.5) / requests)) for i in range(requests)]
        lengths = [max(SHORTEST, min(longest, round(length))) for length in drawn]
        rng.shuffle(lengths)
        prompts = [[rng.randrange(3, min(vocabulary, 40000)) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
        return cls(prompts, lengths)

    @property
    def useful(self) -> int:
        return sum(self.lengths)


def cores() -> tuple[list[int], list[int]]:
    """Of the engine, and of who asks."""
    cpus = available_cpus()
    return cpus[-1:], cpus[:1]


async def ask(engine: RolloutEngine, load: Load, concurrent: int, name: str) -> float:
    """Seconds for the whole load."""
    turns = iter(range(len(load.lengths)))

    async def one_after_the_other() -> None:
        for i in turns:
            sampling = SamplingParams(max_new_tokens=load.lengths[i], seed=i, ignore_eos=True)
            request = GenerationRequest(request_id=f"{name}/{i}", input_ids=load.prompts[i], sampling=sampling)
            answer = await engine.generate(request)
            assert len(answer.output_ids) == load.lengths[i]

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrent):
            tasks.create_task(one_after_the_other())
    return time.perf_counter() - began


async def served(name: str, model: str, dtype: str, loads: dict[int, Load], rounds: int) -> dict[int, list[float]]:
    """Seconds of each load, by concurrency, of a server: "embedded", "vllm" or "vllm-compiled"."""
    kind, _, compiled = name.partition("-")
    rollout = RolloutSettings(
        engine=kind,  # type: ignore[arg-type]
        vllm=VllmSettings(eager="off" if compiled else "on"),
        dtype=dtype,  # type: ignore[arg-type]
        device="cpu",
        max_running=max(CONCURRENT),
        kv_cache_tokens=max(CONCURRENT) * 512,
        start_timeout=900.0,
    )
    cpus, _ = cores()
    found: dict[int, list[float]] = {concurrent: [] for concurrent in loads}
    with tempfile.TemporaryDirectory() as logs:
        child = await start_engine(kind, model, rollout, Path(logs) / f"{kind}.log", threads=1, cpus=cpus)
        try:
            async with KINDS[kind].client(kind, child.url, child.token, model, rollout, 900.0) as engine:
                await ask(engine, loads[min(loads)], 1, "warm")
                for number in range(rounds):
                    for concurrent, load in loads.items():
                        found[concurrent].append(await ask(engine, load, concurrent, f"{number}/{concurrent}"))
        finally:
            await child.stop()
    return found


def generated(model: str, dtype: str, loads: dict[int, Load], rounds: int) -> dict[int, list[float]]:
    """The same of `generate`, in a process of its own."""
    cpus, _ = cores()
    options = {"model": model, "dtype": dtype, "rounds": rounds, "cpus": cpus}
    options["loads"] = {c: [load.prompts, load.lengths] for c, load in loads.items()}
    command = [sys.executable, __file__, "--generate", "-"]
    environment = os.environ | thread_environment(1)
    done = subprocess.run(
        command, input=json.dumps(options), env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=3600
    )
    return {int(c): seconds for c, seconds in json.loads(done.stdout.splitlines()[-1]).items()}


def generate_here(options: dict[str, Any]) -> dict[int, list[float]]:
    """In the child."""
    os.sched_setaffinity(0, options["cpus"])
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"])).eval()
    loads = {int(c): Load(*load) for c, load in options["loads"].items()}

    def run(load: Load, batch: int) -> float:
        began = time.perf_counter()
        for i in range(0, len(load.lengths), batch):
            ids = torch.tensor(load.prompts[i : i + batch])
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(load.lengths[i : i + batch]),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                pad_token_id=0,
            )
        return time.perf_counter() - began

    with torch.inference_mode():
        run(Load(loads[1].prompts[:1], [4]), 1)
        found: dict[int, list[float]] = {concurrent: [] for concurrent in loads}
        for _ in range(options["rounds"]):
            for concurrent, load in loads.items():
                found[concurrent].append(run(load, concurrent))
    return found


def rows_of(engine: str, loads: dict[int, Load], seconds: dict[int, list[float]]) -> list[dict[str, Any]]:
    """A row a concurrency."""
    rows = []
    for concurrent, taken in seconds.items():
        rate = spread([loads[concurrent].useful / s for s in taken])
        rows.append({"engine": engine, "concurrent": concurrent, "useful tokens/s": rate["median"]})
        rows[-1] |= {"min": rate["min"], "max": rate["max"], "tokens": loads[concurrent].useful}
    return rows


def fitting_dtype() -> str:
    """bf16 where this CPU has instructions for it: elsewhere it is fp32 and many conversions."""
    return "bfloat16" if "bf16" in machine()["cpu"] else "float32"


def has_vllm() -> bool:
    """Whether `make vllm` has been here."""
    return Path(RolloutSettings(engine="vllm").vllm.python).exists()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small model, short answers, without vLLM; a minute")
    parser.add_argument("--model", help="a Hugging Face directory")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--share", type=int, help="one in SHARE of the requests (default: 1, or 2 with --quick)")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.generate:
        print(json.dumps(generate_here(json.load(sys.stdin))))
        return
    model = resolve_model(options.model or ("builtin:small" if options.quick else "models/smollm2"))
    try:
        facts = inspect_model(model, "--model")
    except UserError as error:
        raise SystemExit(str(error)) from None
    dtype = options.dtype or ("float32" if options.quick else fitting_dtype())
    engines = options.engines.split(",") if options.engines else list(ENGINES)
    if unknown := set(engines) - set(ENGINES):
        raise SystemExit(f"--engines {min(unknown)}: no engine here; there are {', '.join(ENGINES)}")
    if options.quick and not options.engines:
        engines = ["embedded", "generate"]
    if not has_vllm() and any(engine.startswith("vllm") for engine in engines):
        print("there is no vLLM here (`make vllm` sets it up): it is left out", file=sys.stderr)
        engines = [engine for engine in engines if not engine.startswith("vllm")]
    rounds = options.rounds or (1 if options.quick else 3)
    longest = 64 if options.quick else LONGEST
    share = options.share or (2 if options.quick else 1)
    loads = {c: Load.of(max(c, REQUESTS[c] // share), facts.vocabulary or 46, longest) for c in CONCURRENT}
    _, mine = cores()
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, mine)
    rows = []
    for engine in engines:
        if engine == "generate":
            seconds = generated(model, dtype, loads, rounds)
        else:
            seconds = asyncio.run(served(engine, model, dtype, loads, rounds))
        rows += rows_of(engine, loads, seconds)
        print(f"{engine}: {[round(r['useful tokens/s'], 1) for r in rows if r['engine'] == engine]}", file=sys.stderr)
    os.sched_setaffinity(0, everywhere)
    headline: dict[str, Any] = {
        engine: {row["concurrent"]: round(row["useful tokens/s"], 1) for row in rows if row["engine"] == engine}
        for engine in engines
    }
    report("engines", {**headline, "model": Path(model).name, "dtype": dtype, "rounds": rounds}, rows)


if __name__ == "__main__":
    main()
