"""A tiny model with a character-level tokenizer, as a Hugging Face directory."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fleuve.modeling.loading import build_model

TINY = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ ';' }}{% endfor %}assistant: "


def tiny_model(seed: int = 0, **changes: object) -> torch.nn.Module:
    """A random model of 0.1 M parameters; the same seed gives the same one."""
    torch.manual_seed(seed)
    return build_model({**TINY, **changes}).eval()


def character_tokenizer() -> PreTrainedTokenizerFast:
    characters = ["<pad>", "<bos>", "<eos>", *sorted(set(string.printable) - set("\t\r\x0b\x0c"))]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path
