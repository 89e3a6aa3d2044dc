"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from served import Client, serving
from tiny_engine import character_tokenizer, tiny_model

from fleuve.weights.store import WeightStore


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


@pytest.fixture
async def client(model_dir: Path, tmp_path: Path) -> AsyncIterator[Client]:
    async with serving(model_dir, weights=tmp_path.parent) as client:
        yield client


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    store = WeightStore(tmp_path / "weights", keep=10)
    yield store
    store.close()
