"""What one GRPO step of SmolLM2-135M costs: 8 prompts × 8 answers × exactly 128 tokens, bf16, in CPU seconds.

    python benchmarks/step_cost.py [--quick] [--model models/smollm2]

Generation by the embedded engine, then a whole step of the trainer on those answers (proximal forward, two minibatches,
AdamW on fp32 masters), one after the other in one process on one thread. Every answer gets an advantage, so that none
is passed over. Without the model's directory (`fleuve fetch smollm2`) its shape is built with random weights: the cost
is the same.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from _report import report, spread

from fleuve.config.settings import Settings
from fleuve.engine.engine import Engine
from fleuve.engine.options import EngineOptions
from fleuve.engine.service import open_engine
from fleuve.modeling.char_tokenizer import build_char_tokenizer
from fleuve.modeling.loading import build_model
from fleuve.train.trainer import Trainer
from fleuve.types import Batch, Completion, GenerationRequest, Group, Prompt, SamplingParams, Trajectory
from fleuve.weights.directory import make_directory
from fleuve.weights.store import WeightStore

GROUPS, SAMPLES, PROMPT_TOKENS = 8, 8, 40
SHAPE = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def generate(engine: Engine, tokens: int, seed: int) -> list[list[Completion]]:
    """`[groups, samples]` answers of exactly `tokens` tokens."""
    rng = random.Random(seed)
    for group in range(GROUPS):
        prompt = [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
        for sample in range(SAMPLES):
            sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=rng.randrange(2**31))
            engine.add(GenerationRequest(request_id=f"{group}/{sample}", input_ids=prompt, sampling=sampling))
    ended: dict[str, Completion] = {}
    while not engine.idle:
        for end in engine.step().ended:
            assert isinstance(end, Completion)
            ended[end.request_id] = end
    return [[ended[f"{g}/{s}"] for s in range(SAMPLES)] for g in range(GROUPS)]


def as_batch(answers: list[list[Completion]], version: int) -> Batch:
    """Alternating rewards: every answer has an advantage."""
    groups = []
    for number, group in enumerate(answers):
        trajectories = [
            Trajectory(
                prompt_ids=np.zeros(PROMPT_TOKENS, np.int32),
                output_ids=np.asarray(c.output_ids, np.int32),
                logprobs=np.asarray(c.logprobs, np.float32),
                versions=np.full(len(c.output_ids), version, np.int32),
                loss_mask=np.ones(len(c.output_ids), np.bool_),
                finish_reason="length",
                reward=float(sample % 2),
            )
            for sample, c in enumerate(group)
        ]
        prompt = Prompt(id=str(number), input_ids=[0] * PROMPT_TOKENS, text="", answer="")
        groups.append(Group(id=number, prompt=prompt, trajectories=trajectories, admitted_version=version))
    return Batch(version=version, groups=groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--quick", action="store_true", help="answers of 16 tokens, one round")
    args = parser.parse_args()
    tokens, rounds = (16, 1) if args.quick else (128, 3)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        path, weights = Path(args.model), "its own"
        if not path.is_dir():
            path, weights = Path(scratch), "random"
            build_model(SHAPE, torch.bfloat16).save_pretrained(path)
            build_char_tokenizer("0123456789").save_pretrained(path)
        settings = Settings.model_validate(
            {
                "run_dir": scratch,
                "model": {"path": str(path)},
                "data": {"train": "procedural:chain"},
                "control": {"batch_size": GROUPS},
                "trainer": {"dtype": "bfloat16", "token_budget": 2048, "minibatches": 2, "learning_rate": 1e-9},
            }
        )
        engine = open_engine(EngineOptions(model=str(path), dtype="bfloat16", threads=1))
        store = WeightStore(make_directory(), keep=1)
        try:
            trainer = Trainer(settings, store)
            costs: list[tuple[float, float]] = []
            for turn in range(rounds + 1):
                began = time.process_time()
                answers = generate(engine, tokens, seed=turn)
                between = time.process_time()
                trainer.step(as_batch(answers, trainer.version))
                if turn:  # the first warms up
                    costs.append((between - began, time.process_time() - between))
        finally:
            store.close()
    generated, trained = GROUPS * SAMPLES * tokens, GROUPS * SAMPLES * (tokens + PROMPT_TOKENS)
    parts = {"generation": ([g for g, _ in costs], generated), "training": ([t for _, t in costs], trained)}
    rows = [
        {"part": name, "tokens": n, "CPU seconds": spread(seconds)["median"], "min": min(seconds), "max": max(seconds)}
        | {"tokens per CPU second": n / spread(seconds)["median"]}
        for name, (seconds, n) in parts.items()
    ]
    total = spread([g + t for g, t in costs])
    headline = {"cpu_seconds_per_step": total["median"], "min": total["min"], "max": total["max"], "weights": weights}
    report("step_cost", headline, rows)


if __name__ == "__main__":
    main()
