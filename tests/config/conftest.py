"""The settings of a sound run, its model and its data, for tests that break one thing of them."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checked import Make
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from fleuve.config.settings import Settings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory whose tokenizer makes one token of each character; context 100."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 100}')
    save_file({"weight": np.zeros(100, dtype=np.float32)}, directory / "model.safetensors")
    tokenizer = Tokenizer(WordLevel({c: i for i, c in enumerate(string.printable)}, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1+" * n + "1?", "answer": str(n + 1)}) + "\n" for n in (1, 9, 4)))
    return path


@pytest.fixture
def make(tmp_path: Path, model: Path, rows: Path) -> Make:
    def settings(**sections: Any) -> Settings:
        values: dict[str, Any] = {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": str(model)},
            "data": {"train": str(rows)},
            "rollout": {"max_new_tokens": 50},
        }
        for section, content in sections.items():
            values[section] = values.get(section, {}) | content if isinstance(content, dict) else content
        return Settings.model_validate(values)

    return settings
