"""From a row to what the model reads: instruction, chat template, token ids."""

from __future__ import annotations

from typing import Any

from fleuve.config.settings import DataSettings
from fleuve.data.rows import Row, as_text
from fleuve.errors import UserError
from fleuve.types import Prompt

VERIFIER_FIELD = "verifier"
"""The field of a row that says who compares answers to it."""


def prompt_text(row: Row, data: DataSettings, tokenizer: Any) -> str:
    """The text before the answer.

    Raises:
        UserError: `template = "chat"` and the tokenizer has no chat template.
    """
    # Not `str.format`: an instruction may well contain other braces, such as \\boxed{}.
    content = data.instruction.replace("{prompt}", row.fields[data.prompt_field])
    if data.template == "none":
        return f"{data.system_prompt}{content}" if data.system_prompt else content
    if not getattr(tokenizer, "chat_template", None):
        raise UserError('data.template = "chat": this model\'s tokenizer has no chat template; use "none"')
    messages = [{"role": "user", "content": content}]
    if data.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def prompt_ids(text: str, data: DataSettings, tokenizer: Any) -> list[int]:
    """Token ids of a `prompt_text`. A chat template writes its own special tokens; else the tokenizer adds them."""
    return _ids(tokenizer, text, add_special_tokens=data.template == "none")


def row_verifier(row: Row, data: DataSettings) -> str:
    """Who compares answers to this row: whom its field `verifier` names, else `data.verifier`."""
    named = row.fields.get(VERIFIER_FIELD)
    return named if isinstance(named, str) else data.verifier


def make_prompt(id: str, row: Row, data: DataSettings, tokenizer: Any) -> Prompt:
    """The row as a prompt, ready to be sent to an engine.

    Raises:
        UserError: the prompt has no tokens, or see `prompt_text`.
    """
    text = prompt_text(row, data, tokenizer)
    ids = prompt_ids(text, data, tokenizer)
    if not ids:
        raise UserError(f"{row.where}: the prompt has no tokens")
    return Prompt(
        id=id,
        input_ids=ids,
        text=text,
        answer=as_text(row.fields[data.answer_field]),
        verifier=row_verifier(row, data),
        row=row.fields,
    )


def make_demonstration(
    row: Row, data: DataSettings, completion_field: str, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its worked-out completion, without an end-of-sequence token."""
    ids = prompt_ids(prompt_text(row, data, tokenizer), data, tokenizer)
    return ids, _ids(tokenizer, row.fields[completion_field], add_special_tokens=False)


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    return ids
