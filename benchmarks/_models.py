"""Models for benchmarks of what does not depend on what the weights are worth."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from fleuve.config.models import resolve_model
from fleuve.modeling.loading import build_model

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 100000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""SmolLM2-135M's shape."""


def write_random_model(directory: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """A random model as a Hugging Face directory, with the small model's tokenizer, which nobody asks anything."""
    torch.manual_seed(0)
    build_model(config, dtype).save_pretrained(directory)
    for file in Path(resolve_model("builtin:small")).glob("tokenizer*"):
        shutil.copy(file, directory)
