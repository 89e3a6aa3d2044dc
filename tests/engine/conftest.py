"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_engine import character_tokenizer, tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its tokenizer as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path
