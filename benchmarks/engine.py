"""The embedded engine against transformers' `generate`: useful tokens a second on the same prompts, model and core.

Two loads of 64 requests, sampled at temperature 1 with the lengths forced:
- heavy-tailed: log-normal lengths (σ = 1), the longest some 100 times the shortest, as reasoning is;
- equal: every answer as long as every other, which is `generate` at its best.

`generate` answers the requests in batches of 64 and of 32 and its better figure counts; a batch runs until its longest
answer is done, and only the tokens asked for count as useful. The engine gets all 64 at once. Both run in this process
on one thread, turn about, `--rounds` times; a ratio is taken within each round. Time is the CPU time of this process:
with its one thread the same as the clock's on a quiet machine, and untouched by what else runs on a busy one.

    python benchmarks/engine.py [--quick] [--model PATH] [--rounds N] [--dtype bfloat16|float32]

Without `--model` the architecture is SmolLM2-135M's with random weights: the lengths are forced, so the values of the
weights do not matter to the time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import math
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from _models import SMOLLM2
from _report import report, spread

from fleuve.engine.engine import Engine
from fleuve.engine.linear import pack_linears
from fleuve.engine.scheduler import Limits
from fleuve.modeling.attention import NAME
from fleuve.modeling.loading import build_model, load_model
from fleuve.types import GenerationRequest, SamplingParams

QUICK = SMOLLM2 | {"num_hidden_layers": 6, "vocab_size": 8192}
REQUESTS = 64
BATCHES = (64, 32)


@dataclass(frozen=True)
class Load:
    """Prompts and how many tokens to answer each with."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def useful(self) -> int:
        return sum(self.lengths)


def heavy_tailed(median: int, vocabulary: int) -> Load:
    """Log-normal lengths at evenly spaced quantiles (no luck of the draw in the tail), in random order."""
    normal, rng = statistics.NormalDist(), random.Random(0)
    quantiles = [(i + 0.5) / REQUESTS for i in range(REQUESTS)]
    lengths = [max(1, round(median * math.exp(normal.inv_cdf(q)))) for q in quantiles]
    rng.shuffle(lengths)
    return Load("heavy-tailed", _prompts(rng, vocabulary), lengths)


def equal(length: int, vocabulary: int) -> Load:
    """Every answer `length` tokens."""
    return Load("equal", _prompts(random.Random(1), vocabulary), [length] * REQUESTS)


def _prompts(rng: random.Random, vocabulary: int) -> list[list[int]]:
    return [[rng.randrange(3, vocabulary) for _ in range(rng.randint(16, 48))] for _ in range(REQUESTS)]


def run_engine(model: torch.nn.Module, load: Load) -> None:
    """All requests at once through the engine's steps."""
    engine = Engine(model, Limits(max_running=REQUESTS, kv_cache_tokens=65536, prefill_tokens=4096, context=8192))
    for i, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True)):
        sampling = SamplingParams(max_new_tokens=length, seed=i, ignore_eos=True)
        engine.add(GenerationRequest(request_id=str(i), input_ids=prompt, sampling=sampling))
    done = 0
    while not engine.idle:
        done += sum(len(c.output_ids) for c in engine.step().ended)  # type: ignore[union-attr]
    assert done == load.useful


@torch.inference_mode()
def run_generate(model: torch.nn.Module, load: Load, batch: int) -> None:
    """Batches in the order of the requests, padded on the left, each to its longest answer."""
    for i in range(0, REQUESTS, batch):
        prompts, longest = load.prompts[i : i + batch], max(load.lengths[i : i + batch])
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape[1] == width + longest


def measure(
    served: torch.nn.Module, model: torch.nn.Module, load: Load, rounds: int
) -> tuple[list[dict[str, Any]], list[float]]:
    """Rows for the table, and the engine's ratio to the better `generate` of each round; the engine has `served`."""
    ways = {"engine": lambda: run_engine(served, load)}
    ways |= {f"generate, batches of {b}": lambda b=b: run_generate(model, load, b) for b in BATCHES}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    clock: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            started, on_clock = time.process_time(), time.perf_counter()
            ways[way]()
            seconds[way].append(time.process_time() - started)
            clock[way].append(time.perf_counter() - on_clock)
    ratios = [min(seconds[way][r] for way in ways if way != "engine") / seconds["engine"][r] for r in range(rounds)]
    rows = []
    for way, taken in seconds.items():
        rate = spread([load.useful / s for s in taken])
        rows.append({"load": load.name, "way": way, "useful tokens/s": rate["median"], "min": rate["min"]})
        rows[-1] |= {"max": rate["max"], "CPU seconds": statistics.median(taken)}
        rows[-1]["seconds on the clock"] = statistics.median(clock[way])
    return rows, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, within a minute")
    parser.add_argument("--model", help="a model directory in place of random weights")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    model = (
        load_model(options.model, dtype) if options.model else build_model(QUICK if options.quick else SMOLLM2, dtype)
    )
    model.eval()
    served = copy.deepcopy(model)
    served.set_attn_implementation(NAME)  # type: ignore[operator]
    pack_linears(served)
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    rounds = options.rounds or (1 if options.quick else 3)
    run_engine(served, equal(2, vocabulary))  # first calls choose kernels
    run_generate(model, equal(2, vocabulary), REQUESTS)

    median, length = (16, 32) if options.quick else (24, 48)
    heavy_rows, heavy_ratios = measure(served, model, heavy_tailed(median, vocabulary), rounds)
    equal_rows, equal_ratios = measure(served, model, equal(length, vocabulary), rounds)
    headline = {
        "ratio_heavy_tailed": statistics.median(heavy_ratios),
        "ratio_heavy_tailed_spread": [min(heavy_ratios), max(heavy_ratios)],
        "ratio_equal": statistics.median(equal_ratios),
        "ratio_equal_spread": [min(equal_ratios), max(equal_ratios)],
        "engine_tokens_per_second_heavy_tailed": heavy_rows[0]["useful tokens/s"],
        "engine_tokens_per_second_equal": equal_rows[0]["useful tokens/s"],
        "model": options.model or ("SmolLM2's shape, 6 layers" if options.quick else "SmolLM2-135M, random weights"),
        "dtype": options.dtype,
        "rounds": rounds,
    }
    report("engine", headline, heavy_rows + equal_rows)


if __name__ == "__main__":
    main()
