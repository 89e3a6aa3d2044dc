"""Tiny random models and batches for the tests of training."""

from pathlib import Path

import numpy as np
import torch

from fleuve.config.settings import Settings
from fleuve.modeling.char_tokenizer import build_char_tokenizer
from fleuve.modeling.loading import build_model
from fleuve.train.trainer import Trainer
from fleuve.types import Batch, Group, Prompt, Trajectory
from fleuve.weights.store import WeightStore

ALPHABET = "0123456789+-*/=;#? abcdefgh"
VOCABULARY = len(ALPHABET) + 3
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "mistral-window": {"model_type": "mistral", "sliding_window": 5},
    "gemma2-window-softcap": {"model_type": "gemma2", "sliding_window": 4, "query_pre_attn_scalar": 16},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 4, "query_pre_attn_scalar": 16},
}


def save_tiny_model(
    path: Path, family: str = "qwen3-tied", seed: int = 0, scale: float = 8.0, **fields: object
) -> Path:
    """A random model with its tokenizer. `scale` multiplies the output head's input so that its distributions are
    far from uniform."""
    torch.manual_seed(seed)
    model = build_model({**SMALL, **FAMILIES[family], **fields})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale if "embed" in name or "lm_head" in name else 2.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    build_char_tokenizer(ALPHABET).save_pretrained(path)
    return path


def settings_for(model: Path, **sections: dict[str, object]) -> Settings:
    """Settings of a run of `model`; sections are merged over defaults that suit tiny models."""
    defaults: dict[str, dict[str, object]] = {
        "trainer": {"learning_rate": 1e-3, "token_budget": 64, "logprob_chunk": 16, "minibatches": 2},
        "control": {"batch_size": 4},
    }
    merged = {key: defaults.get(key, {}) | sections.get(key, {}) for key in {*defaults, *sections}}
    return Settings.model_validate(
        {"run_dir": "unused", "model": {"path": str(model)}, "data": {"train": "unused"}, **merged}
    )


def make_trainer(model: Path, store: Path, **sections: dict[str, object]) -> Trainer:
    """A trainer of `model` that publishes into `store`."""
    return Trainer(settings_for(model, **sections), WeightStore(store, keep=2))


def make_batch(
    seed: int = 0, groups: int = 4, size: int = 3, version: int = 0, oldest: int = 0, noise: float = 0.3
) -> Batch:
    """Random answers with random rewards; recorded log-probabilities are near −2, versions between `oldest` and
    `version`."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        prompt = rng.integers(3, VOCABULARY, rng.integers(2, 7)).astype(np.int32)
        answers = []
        for i in range(size):
            n = int(rng.integers(2, 14))
            answers.append(
                Trajectory(
                    prompt_ids=prompt,
                    output_ids=rng.integers(1, VOCABULARY, n).astype(np.int32),
                    logprobs=(-2.0 + noise * rng.standard_normal(n)).astype(np.float32),
                    versions=np.sort(rng.integers(oldest, version + 1, n)).astype(np.int32),
                    loss_mask=rng.random(n) < 0.9,
                    finish_reason="stop" if i % 3 else "length",
                    reward=float(rng.integers(0, 3)) / 2,
                )
            )
        answers[0].reward, answers[-1].reward = 1.0, 0.0  # no group ties by chance
        prompt_of = Prompt(id=f"p{g}", input_ids=prompt.tolist(), text="", answer="")
        made.append(Group(id=100 + g, prompt=prompt_of, trajectories=answers, admitted_version=oldest))
    return Batch(version=version, groups=made)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of the master weights."""
    return {name: m.detach().clone() for name, m in trainer.optimizer.masters.items()}


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
