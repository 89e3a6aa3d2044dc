"""Opening a model directory's tokenizer, without torch where the directory's tokenizer is a plain one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleuve.config.models import resolve_model
from fleuve.errors import UserError

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that are all said by `tokenizer.json`. transformers imports torch and takes seconds to look up any other."""
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model directory or hub name.

    Raises:
        UserError: there is none, or its files cannot be read.
    """
    source = resolve_model(path)
    try:
        return _load(Path(source))
    except Exception as error:  # a broken file can raise anything, the tokenizers library a bare Exception
        if Path(source).is_dir() and not any((Path(source) / name).exists() for name in FILES):
            raise UserError(
                f"the model directory {source} has no tokenizer (tokenizer.json and tokenizer_config.json): "
                "save one beside the model"
            ) from error
        reason = " ".join(str(error).split("\n")[0].split())
        raise UserError(f"cannot open the tokenizer in {source}: {type(error).__name__}: {reason}") from error


def _load(directory: Path) -> Any:
    config = directory / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class") in PLAIN:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)


def answer_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Token ids of an answer to the text that verifiers and people read: without special tokens."""
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
