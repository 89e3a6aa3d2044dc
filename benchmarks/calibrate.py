"""What a machine takes for the parts of a run, as `[simulate]` for the simulator.

    python benchmarks/calibrate.py RUN [--config examples/quickstart.toml] [--threads N] [--trainer-threads N]

RUN is a run directory of `fleuve train` with rollouts. From it come the answers' lengths and what is learnt from, how
long a verdict takes, how long publishing and loading weights take, and the trainer's times; with `--trainer-threads`
these are measured here, on RUN's own batches. The engine's times are always measured here: its own steps with 1 to 96
answers and short and long caches. Nothing else should run. What is printed is TOML: append it to a settings file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _measure import engine_steps, trainer_times

from fleuve.simulate.calibrate import (
    fit_engine,
    fit_trainer,
    learnt_share,
    prompt_share,
    prompt_tokens,
    verdict_seconds,
)


def answers(run: Path) -> list[str]:
    """Words for `fleuve simulate` that say what the run's prompts, answers and verdicts are like."""
    values = {
        "prompt_tokens": prompt_tokens(run),
        "learnt": learnt_share(run),
        "reward_seconds": verdict_seconds(run),
        "lengths.file": run,
        "lengths.prompt_share": prompt_share(run),
    }
    return [word for name, value in values.items() for word in (f"--simulate.{name}", str(value))]


def times(measured: dict[str, float]) -> list[str]:
    """The same for what was measured."""
    return [word for name, value in measured.items() for word in (f"--simulate.measured.{name}", str(value))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--config", default="examples/quickstart.toml", help="Settings of the engine.")
    parser.add_argument("--threads", type=int, default=1, help="Of an engine.")
    parser.add_argument("--trainer-threads", type=int, help="Measure the trainer with as many.")
    args = parser.parse_args()
    again = None if args.trainer_threads is None else trainer_times(args.run, args.trainer_threads)
    measured = fit_engine(engine_steps(args.config, args.threads)) | fit_trainer(args.run, again)
    print(
        f"[simulate]\nprompt_tokens = {prompt_tokens(args.run)}\nlearnt = {learnt_share(args.run):.3f}\n"
        f"reward_seconds = {verdict_seconds(args.run):.3g}\n\n"
        f'[simulate.lengths]\nfile = "{args.run}"\nprompt_share = {prompt_share(args.run):.3f}\n'
    )
    print("[simulate.measured]")
    for name, value in measured.items():
        print(f"{name} = {value:.3g}")


if __name__ == "__main__":
    main()
