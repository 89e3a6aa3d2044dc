"""Opening a model directory's tokenizer, without torch where the directory's tokenizer is a plain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleuve.config.models import resolve_model

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that are all said by `tokenizer.json`. transformers imports torch and takes seconds to look up any other."""


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model directory or hub name.

    Raises:
        OSError: there is none.
    """
    directory = Path(resolve_model(path))
    config = directory / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class") in PLAIN:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))
