"""A device put to the test: conformance, a short training run, throughput and memory against the plan. For
`scripts/gpu_check.sh`, which finds or makes the environment.

    python benchmarks/gpu_check.py [--device cuda|cpu] [--size full|toy] [--parts conformance,train,engine,trainer]

Each part is a process of its own with a time limit, so that one that fails or hangs costs its own rows only; the whole
ends within 8 minutes. `full` takes a 1.5B model's shape (random weights, bf16) for throughput and memory, `toy` the
small model. Predictions are those of `fleuve plan`'s cost models for this device, with their default constants; memory
is what the device has in use beyond what it had before. Exit status 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"conformance": 150, "train": 120, "engine": 100, "trainer": 100}
"""Seconds of each part; together less than 8 minutes."""
QWEN_1_5B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
Row = dict[str, Any]


def row(part: str, what: str, measured: Any, predicted: float | None = None) -> Row:
    """A line of the table."""
    found: Row = {"part": part, "what": what, "measured": measured}
    if predicted:
        found |= {"predicted": predicted, "measured/predicted": measured / predicted}
    return found


# --- the parts, each in a process of its own ------------------------------------------------------------------------


def conformance(device: str, size: str, directory: Path) -> list[Row]:
    """The engine's contract, with the embedded engine on this device."""
    tolerance = ["--engine-tolerance", "1e-4,2e-3"] if device == "cuda" else []
    command = [sys.executable, "-m", "pytest", "tests/conformance", "-q", "-p", "no:cacheprovider"]
    command += ["--engine-kind", "embedded", "--engine-device", device, *tolerance]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout[-6000:], file=sys.stderr)
    last = [
        line for line in done.stdout.splitlines() if " passed" in line or " failed" in line or line.startswith("FA")
    ]
    rows = [row("conformance", line, "failed") for line in last if line.startswith("FAILED")]
    outcome = "all hold" if done.returncode == 0 else "failed"
    return [*rows, row("conformance", "the engine's contract", outcome), row("conformance", "seconds", _since(began))]


def train(device: str, size: str, directory: Path) -> list[Row]:
    """The quickstart's run, shortened."""
    steps = 20 if size == "full" else 2
    command = [sys.executable, "-m", "fleuve", "train", str(ROOT / "examples/quickstart.toml")]
    options = {"run_dir": directory / "run", "steps": steps, "rollout.device": device, "trainer.device": device}
    options |= {"evaluate.every": 0, "observe.live": "off"}
    if size == "toy":
        options |= {"control.batch_size": 4, "rollout.max_new_tokens": 32}
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    seconds = _since(began)
    lines = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    half = lines[len(lines) // 2 :]
    differences = [line["mismatch/logprob_abs_mean"] for line in lines if "mismatch/logprob_abs_mean" in line]
    found = {
        "steps": len(lines),
        "seconds, start included": seconds,
        "seconds a step, second half": sum(line["time/step"] for line in half) / len(half),
        "logprob difference, engine and trainer": max(differences, default=0.0),
        "staleness, largest": max(line["staleness/max"] for line in lines),
    }
    return [row("train", what, value) for what, value in found.items()]


def engine(device: str, size: str, directory: Path) -> list[Row]:
    """Prefill and decoding by the embedded engine, without a server around it."""
    import torch

    from fleuve.engine.engine import Engine
    from fleuve.engine.scheduler import Limits
    from fleuve.modeling.loading import DTYPES, load_model
    from fleuve.simulate.engine_costs import EngineCosts
    from fleuve.simulate.hardware import load_hardware
    from fleuve.simulate.layout import layout_of
    from fleuve.simulate.memory import engine_memory
    from fleuve.types import GenerationRequest, SamplingParams

    prompt, new, numbers = (512, 64, (1, 64, 256)) if size == "full" else (32, 16, (1, 8))
    settings = settings_of(device, size, directory, max_running=numbers[-1])
    rollout, costs = settings.rollout, EngineCosts.of(settings)
    before = in_use(device)
    model = load_model(settings.model.path, DTYPES[rollout.dtype], device)
    limits = Limits(numbers[-1], rollout.kv_cache_tokens, rollout.prefill_tokens, 2048 if size == "full" else 512)
    rows = []
    for number in (numbers[0], *numbers):  # the first one twice: it warms up
        served = Engine(model, limits)
        for i in range(number):
            tokens = [3 + (i * 37 + j * (i + 1)) % 40 for j in range(prompt)]
            sampling = SamplingParams(max_new_tokens=new, seed=i, ignore_eos=True)
            served.add(GenerationRequest(request_id=str(i), input_ids=tokens, sampling=sampling))
        began = time.perf_counter()
        while served.scheduler.waiting or any(s.pending > 1 for s in served.scheduler.running):
            served.step()
        prefill = _since(began)
        began, steps = time.perf_counter(), 0
        while len(served.scheduler.running) == number:
            served.step()
            steps += 1
        decode = _since(began) / steps
        base, per_kv = costs.decode(number)
        predicted = base + per_kv * number * (prompt + new / 2)
        rows += [
            row("engine", f"prefill of {number} × {prompt}, s", prefill, costs.prefill_seconds(number * prompt)),
            row("engine", f"decode step of {number}, ms", decode * 1e3, predicted * 1e3),
            row("engine", f"decoding {number}, tokens a second", number / decode, number / predicted),
        ]
        cached = sum(s.capacity for s in served.scheduler.running)
        while not served.idle:
            served.step()
    memory = engine_memory(settings, load_hardware(settings.simulate.hardware), costs.shape, layout_of(settings))
    if device == "cuda":
        expected = memory.weights + memory.workspace + cached * memory.kv_token
        rows.append(row("engine", "memory in use, GB", (in_use(device) - before) / 1e9, expected / 1e9))
    del model
    assert torch.is_inference_mode_enabled() is False
    return rows[3:]


def trainer(device: str, size: str, directory: Path) -> list[Row]:
    """Steps of the trainer on random answers."""
    from fleuve.simulate.hardware import load_hardware
    from fleuve.simulate.layout import layout_of
    from fleuve.simulate.memory import trainer_memory
    from fleuve.simulate.trainer_costs import TrainerCosts
    from fleuve.train.trainer import Trainer
    from fleuve.weights.store import WeightStore

    groups, answers, length = (16, 8, 1024) if size == "full" else (4, 2, 32)
    settings = settings_of(device, size, directory)
    costs = TrainerCosts.of(settings)
    before = in_use(device)
    trained = Trainer(settings, WeightStore(directory / "weights", keep=1))
    batches = [random_batch(version, groups, answers, length) for version in range(2)]
    trained.step(batches[0])  # warms up
    began = time.perf_counter()
    metrics = trained.step(batches[1]).metrics
    synchronise(device)
    seconds = _since(began)
    used = in_use(device) - before
    began = time.perf_counter()
    trained.publish()
    published = _since(began)
    half = groups // settings.trainer.minibatches * answers
    lengths = [[length + 16] * half] * settings.trainer.minibatches
    tokens = sum(map(sum, lengths))
    predicted = costs.step_seconds(lengths)
    rows = [
        row("trainer", f"step of {tokens} tokens, s", seconds, predicted),
        row("trainer", "tokens a second", tokens / seconds, tokens / predicted),
        row("trainer", "publishing, s", published, costs.publish_seconds()),
        row("trainer", "gradient norm", metrics["loss/grad_norm"]),
    ]
    if device == "cuda":
        shape, hardware = costs.shape, load_hardware(settings.simulate.hardware)
        total = trainer_memory(settings, hardware, shape, layout_of(settings)).total
        rows.append(row("trainer", "memory in use, GB", used / 1e9, total / 1e9))
    trained.store.close()
    return rows


PARTS: dict[str, Callable[[str, str, Path], list[Row]]] = {
    "conformance": conformance,
    "train": train,
    "engine": engine,
    "trainer": trainer,
}


# --- what they share ------------------------------------------------------------------------------------------------


def settings_of(device: str, size: str, directory: Path, max_running: int = 256) -> Any:
    """Those of a run on this device, with a model that is written into `directory`."""
    import torch
    from _models import write_random_model

    from fleuve.config.settings import Settings

    full, path = size == "full", directory / "model"
    if full and not path.exists():
        write_random_model(path, QWEN_1_5B, torch.bfloat16)
    dtype = "bfloat16" if full else "float32"
    return Settings.model_validate(
        {
            "run_dir": str(directory / "unused"),
            "model": {"path": str(path) if full else "builtin:small"},
            "data": {"train": "procedural:chain"},
            "rollout": {
                "dtype": dtype,
                "device": device,
                "max_running": max_running,
                "kv_cache_tokens": 2**19 if full else 2**14,
                "max_new_tokens": 1024 if full else 128,
                "prefill_tokens": 16384 if full else 1024,
            },
            "control": {"batch_size": 16 if full else 4},
            "trainer": {"dtype": dtype, "device": device, "token_budget": 16384 if full else 1024},
            "simulate": {"hardware": hardware_of(device), "prompt_tokens": 512 if full else 32},
        }
    )


def hardware_of(device: str) -> str:
    """The name in the catalogue; the nearest in kind where this device is not in it."""
    if device == "cpu":
        return "cpu"
    import torch

    from fleuve.simulate.hardware import hardware_names

    name = torch.cuda.get_device_name().lower()
    known = [h for h in hardware_names() if h in name]
    if not known:
        print(f"{name} is not in the catalogue: predictions are those of an h100", file=sys.stderr)
    return known[0] if known else "h100"


def random_batch(version: int, groups: int, answers: int, length: int) -> Any:
    """Answers of one length with rewards that differ."""
    import numpy as np

    from fleuve.types import Batch, Group, Prompt, Trajectory

    rng = np.random.default_rng(version)

    def answer(i: int, prompt: Any) -> Trajectory:
        return Trajectory(
            prompt_ids=prompt,
            output_ids=rng.integers(3, 40, length).astype(np.int32),
            logprobs=np.full(length, -3.5, np.float32),
            versions=np.full(length, version, np.int32),
            loss_mask=np.ones(length, np.bool_),
            finish_reason="length",
            reward=float(i % 2),
        )

    made = []
    for g in range(groups):
        prompt = rng.integers(3, 40, 16).astype(np.int32)
        of = Prompt(id=f"p{version}/{g}", input_ids=prompt.tolist(), text="", answer="")
        trajectories = [answer(i, prompt) for i in range(answers)]
        made.append(Group(id=g, prompt=of, trajectories=trajectories, admitted_version=version))
    return Batch(version=version, groups=made)


def synchronise(device: str) -> None:
    """Wait for what the device was given to do."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def in_use(device: str) -> float:
    """Bytes of the device's memory that anybody uses."""
    if device != "cuda":
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def _since(began: float) -> float:
    return time.perf_counter() - began


def run_part(part: str, options: argparse.Namespace, directory: Path) -> tuple[list[Row], bool]:
    """Its rows, and whether it came to its end."""
    print(f"--- {part}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--device", options.device, "--size", options.size]
    command += ["--only", part, "--directory", str(directory)]
    began, limit = time.perf_counter(), LIMITS[part] * options.patience
    # In a group of its own: what the part has started ends with it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return [row(part, f"not at its end within {limit:g} s", "failed")], False
    if process.returncode != 0:
        return [row(part, f"exit status {process.returncode} after {_since(began):.0f} s", "failed")], False
    rows = json.loads(out.splitlines()[-1])
    return rows, not any(r["measured"] == "failed" for r in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["full", "toy"], default="full")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--patience", type=float, default=1.0, help="times the limits, for a machine that is busy")
    parser.add_argument("--only", choices=[*PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only:
        print(json.dumps(PARTS[options.only](options.device, options.size, options.directory)))
        return 0
    if unknown := set(options.parts.split(",")) - PARTS.keys():
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    from _report import report

    rows: list[Row] = []
    good = True
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.parts.split(","):
            found, ended = run_part(part, options, Path(scratch))
            rows, good = rows + found, good and ended
    figures = {f"{r['part']}: {r['what']}": r["measured"] for r in rows}
    report("gpu_check", {"good": good, "device": options.device, "size": options.size, **figures}, rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
