"""A tiny random model on disk, for tests in which what it says does not matter."""

from __future__ import annotations

import string
from pathlib import Path

import torch

from fleuve.modeling.char_tokenizer import build_char_tokenizer
from fleuve.modeling.loading import build_model


def save_tiny_model(directory: Path, context: int = 128) -> Path:
    """A token is a character."""
    tokenizer = build_char_tokenizer(string.digits + string.ascii_letters + "+-*/=;#? .,'$%!\n")
    torch.manual_seed(0)
    size = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    build_model(size).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
