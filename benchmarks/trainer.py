"""Packed against padded training: the same answers, model, loss and optimiser; the same token budget a micro-batch.

    python benchmarks/trainer.py [--quick]

`padding_ratio` is how many tokens the padded arm computes for each real one; `ratio` is how many times as long its
update takes (forward, backward, AdamW). Packing is worth what it promises if the two are equal. The padded arm is
transformers' own: rows filled up to the longest answer of the batch, an attention mask, its SDPA attention. A second
arm fills up to the longest row of each micro-batch only. Output head, loss and optimiser are the packed arm's own in
all; the padded arms apply the head to every answer position of every row, as trainers on transformers do.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _report import report, spread
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from fleuve.algorithms.aggregation import Totals
from fleuve.algorithms.answers import Answers
from fleuve.algorithms.losses import LossInputs, PolicyLoss
from fleuve.modeling.forward import base_model, logits
from fleuve.modeling.loading import build_model, load_model
from fleuve.train.logprobs import token_logprobs
from fleuve.train.microbatch import MicroBatch, Sample, make_micro_batches
from fleuve.train.optimizer import MasterOptimizer
from fleuve.train.policy import Policy

BUDGET = 8192
CHUNK = 1024
PROMPT = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODELS = {
    "0.6M": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 64}
    | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "9M": {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 6, "vocab_size": 4096}
    | {"num_attention_heads": 5, "num_key_value_heads": 1},
}


@dataclass(frozen=True)
class PaddedRows:
    """`[rows, longest]`: `input_ids`, `attention_mask`. `targets`, `behaviour`, `advantages` are those of all answer
    tokens laid end to end, as in `MicroBatch`."""

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    answers: Answers


def make_samples(count: int, vocabulary: int, median: float, longest: int, seed: int = 0) -> list[Sample]:
    """Answers of heavy-tailed length after prompts of `PROMPT` tokens."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        answer = int(np.clip(rng.lognormal(np.log(median), 0.7), 2, longest))
        tokens = rng.integers(3, vocabulary, PROMPT + answer).astype(np.int32)
        targets = np.arange(PROMPT, len(tokens), dtype=np.int32)
        advantage = np.full(answer, rng.standard_normal(), np.float32)
        behaviour = -np.log(vocabulary) + 0.1 * rng.standard_normal(answer)
        samples.append(Sample(tokens, targets, behaviour.astype(np.float32), np.zeros(answer, np.int32), advantage))
    return samples


def pad(samples: Sequence[Sample], whole_batch: bool) -> list[PaddedRows]:
    """Rows in the order given, as many to a micro-batch as `BUDGET` allows, padding counted."""
    longest = max(len(s.tokens) for s in samples)
    parts: list[list[Sample]] = [[]]
    for sample in samples:
        width = longest if whole_batch else max(len(s.tokens) for s in [*parts[-1], sample])
        if (len(parts[-1]) + 1) * width > BUDGET and parts[-1]:
            parts.append([])
        parts[-1].append(sample)
    return [_padded_rows(part, longest if whole_batch else max(len(s.tokens) for s in part)) for part in parts]


def _padded_rows(samples: Sequence[Sample], width: int) -> PaddedRows:
    input_ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros(len(samples), width, dtype=torch.int64)
    for i, s in enumerate(samples):
        input_ids[i, : len(s.tokens)] = torch.from_numpy(s.tokens)
        mask[i, : len(s.tokens)] = 1
    return PaddedRows(
        input_ids=input_ids,
        attention_mask=mask,
        targets=torch.from_numpy(np.concatenate([s.tokens[s.targets] for s in samples]).astype(np.int64)),
        behaviour=torch.from_numpy(np.concatenate([s.behaviour for s in samples])),
        advantages=torch.from_numpy(np.concatenate([s.advantages for s in samples])),
        answers=Answers.of([len(s.targets) for s in samples]),
    )


def padded_logprobs(model: torch.nn.Module, batch: PaddedRows) -> Tensor:
    """As `Policy.logprobs`, by transformers' batched forward."""
    hidden = base_model(model)(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
    ).last_hidden_state
    answers, targets = hidden[:, PROMPT - 1 : -1], batch.input_ids[:, PROMPT:]
    logprobs, _ = token_logprobs(partial(logits, model), answers.flatten(0, 1), targets.flatten(), 1.0, CHUNK)
    return logprobs[batch.attention_mask[:, PROMPT:].flatten().bool()]


class Arm:
    """One way to train: its model with its optimiser, its micro-batches, and how it computes log-probabilities."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, batches: Sequence[MicroBatch | PaddedRows]) -> None:
        self.optimizer = MasterOptimizer(model, dtype, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        self.batches = batches
        policy = Policy(model, 1.0, CHUNK)
        self.logprobs: Callable[[MicroBatch | PaddedRows], Tensor] = lambda b: (
            policy.logprobs(b)[0] if isinstance(b, MicroBatch) else padded_logprobs(model, b)
        )
        self.tokens = sum(b.input_ids.numel() for b in batches)

    def gradient(self) -> None:
        """Forward and backward of every micro-batch."""
        totals = Totals(sum(len(b.targets) for b in self.batches), sum(b.answers.count for b in self.batches))
        for b in self.batches:
            logprobs = self.logprobs(b)
            inputs = LossInputs(logprobs, logprobs, b.behaviour, b.advantages, torch.zeros_like(b.targets), b.answers)
            loss, _ = PolicyLoss()(inputs, totals)
            loss.backward()

    def update(self) -> float:
        """Seconds of one whole update."""
        started = time.perf_counter()
        self.gradient()
        self.optimizer.step(1e-6, 1.0)
        return time.perf_counter() - started


def compare(name: str, dtype: str, samples: Sequence[Sample], rounds: int, path: Path) -> list[dict[str, object]]:
    """Rows of the report, one an arm; the arms take turns."""
    model = build_model({"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True, **MODELS[name]})
    model.save_pretrained(path)
    plain = partial(AutoModelForCausalLM.from_pretrained, path, dtype=torch.float32, attn_implementation="sdpa")
    arms = {
        "packed": Arm(load_model(str(path), torch.float32), DTYPES[dtype], make_micro_batches(samples, BUDGET)),
        "padded to the batch": Arm(plain().eval(), DTYPES[dtype], pad(samples, whole_batch=True)),
        "padded to the micro-batch": Arm(plain().eval(), DTYPES[dtype], pad(samples, whole_batch=False)),
    }
    real = sum(len(s.tokens) for s in samples)
    _assert_same_gradient(arms, tolerance=1e-3 if dtype == "float32" else 0.05)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(rounds + 1):
        for arm_name, arm in arms.items():
            took = arm.update()
            if turn:  # the first warms up
                seconds[arm_name].append(took)
    rows = []
    for arm_name, arm in arms.items():
        ratios = spread([s / p for s, p in zip(seconds[arm_name], seconds["packed"], strict=True)])
        rows.append(
            {
                "arm": f"{name} {dtype} {arm_name}",
                "seconds": statistics.median(seconds[arm_name]),
                "tokens computed / real": arm.tokens / real,
                "time / packed": ratios["median"],
                "min": ratios["min"],
                "max": ratios["max"],
                "micro-batches": len(arm.batches),
            }
        )
    return rows


def _assert_same_gradient(arms: dict[str, Arm], tolerance: float) -> None:
    """All arms compute the same thing, or the comparison is worth nothing."""
    vectors = {}
    for name, arm in arms.items():
        arm.gradient()
        vectors[name] = torch.cat([m.grad.flatten() for m in arm.optimizer.masters.values() if m.grad is not None])
        arm.optimizer.zero_grad()
    packed = vectors["packed"]
    for name, vector in vectors.items():
        difference = float((vector - packed).norm() / packed.norm())
        if not difference < tolerance:
            raise AssertionError(f"the gradient of {name!r} differs from the packed one by {difference:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model only; under a minute")
    quick = parser.parse_args().quick
    disable_progress_bar()
    torch.set_num_threads(1)
    cases = [("0.6M", "float32", 64 if quick else 128, 60.0)]
    if not quick:
        cases += [("0.6M", "bfloat16", 128, 60.0), ("9M", "float32", 64, 150.0), ("9M", "bfloat16", 64, 150.0)]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        for name, dtype, answers, median in cases:
            samples = make_samples(answers, int(MODELS[name]["vocab_size"]), median, longest=1000)
            rows += compare(name, dtype, samples, rounds=4 if quick else 5, path=Path(directory) / name)
    padded = rows[1]
    headline = {
        "ratio": padded["time / packed"],
        "ratio_min": padded["min"],
        "ratio_max": padded["max"],
        "padding_ratio": padded["tokens computed / real"],
    }
    report("trainer", headline, rows)


if __name__ == "__main__":
    main()
