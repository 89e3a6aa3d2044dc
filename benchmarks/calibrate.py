"""What a machine takes for the parts of a run, as `[simulate.measured]` for the simulator.

    python benchmarks/calibrate.py RUN [--config examples/quickstart.toml]

The trainer's times are those of RUN, a run directory of `fleuve train` with rollouts. The engine's are measured here:
its own steps with 1 to 96 answers and short and long caches, on one thread; CPU time, which on a quiet machine is the
clock's. What is printed is TOML: append it to a settings file.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from pathlib import Path

import torch

from fleuve.config.loader import load_settings
from fleuve.engine.engine import Engine
from fleuve.engine.scheduler import Limits
from fleuve.modeling.attention import NAME
from fleuve.modeling.loading import DTYPES, load_model
from fleuve.simulate.calibrate import EngineStep, fit_engine, fit_trainer, learnt_share
from fleuve.types import GenerationRequest, SamplingParams

NUMBERS = (1, 4, 16, 48, 96)
PROMPTS = (16, 400)
STEPS = 40


def engine_steps(model: torch.nn.Module, number: int, prompt: int) -> list[EngineStep]:
    """One prefill of `number` prompts, then decode steps; those in which memory grows are among them, as in a run."""
    engine = Engine(model, Limits(max_running=number, kv_cache_tokens=10**6, prefill_tokens=10**6, context=1024))
    for i in range(number):
        sampling = SamplingParams(max_new_tokens=STEPS + 2, seed=i, ignore_eos=True)
        tokens = [3 + (i + j) % 32 for j in range(prompt)]
        engine.add(GenerationRequest(request_id=str(i), input_ids=tokens, sampling=sampling))
    found = []
    for step in range(STEPS):
        started = time.process_time()
        engine.step()
        seconds = time.process_time() - started
        if step:
            found.append(EngineStep(seconds, sequences=number, kv_tokens=number * (prompt + step)))
        else:
            found.append(EngineStep(seconds, prefill_tokens=number * prompt))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--config", default="examples/quickstart.toml", help="Settings of the engine.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = load_settings(args.config)
    model = load_model(settings.model.path, DTYPES[settings.rollout.dtype], "cpu")
    model.set_attn_implementation(NAME)
    engine_steps(model, 4, 16)  # warms up
    steps = [step for number in NUMBERS for prompt in PROMPTS for step in engine_steps(model, number, prompt)]
    measured = fit_engine(steps) | fit_trainer(args.run)
    print(f'[simulate]\nlearnt = {learnt_share(args.run):.3f}\n\n[simulate.lengths]\nfile = "{args.run}"\n')
    print("[simulate.measured]")
    for name, value in measured.items():
        print(f"{name} = {value:.3g}")


if __name__ == "__main__":
    main()
