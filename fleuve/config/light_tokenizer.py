"""A model's tokenizer without transformers, which takes seconds to import: enough to measure prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleuve.errors import UserError


class LightTokenizer:
    """The part of a Hugging Face tokenizer that rendering and measuring prompts needs (see `data.render`)."""

    def __init__(self, directory: Path) -> None:
        """Read `tokenizer.json` and the chat template.

        Raises:
            UserError: one of the files cannot be read.
        """
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{path}: cannot be read as a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_config(directory / "tokenizer_config.json")
        self.chat_template = _chat_template(directory, self._config)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """The conversation as text; `tokenize` must be False.

        Raises:
            UserError: the template is broken, or refuses these messages.
        """
        assert not tokenize
        assert self.chat_template is not None
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = time.strftime
        try:
            return environment.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens()
            )
        except TemplateError as error:
            raise UserError(f"the model's chat template: {error}") from None

    def _special_tokens(self) -> dict[str, str]:
        named = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self._config.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                named[name] = content
        return named


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    return config if isinstance(config, dict) else {}


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja`, or the entry in the tokenizer's configuration (its `default`, where there are several)."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None
