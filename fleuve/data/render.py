"""From a row to what the model reads: instruction, chat template, token ids."""

from __future__ import annotations

import json
import re
from typing import Any

from fleuve.config.settings import DataSettings
from fleuve.data.rows import Row, as_text
from fleuve.errors import UserError
from fleuve.types import Prompt

VERIFIER_FIELD = "verifier"
"""The field of a row that says who compares answers to it."""
_PLACE = re.compile(r"\{prompt\}|\{row\.([^{}]+)\}")


def question(row: Row, data: DataSettings) -> str:
    """`data.instruction` with the row's problem in place of `{prompt}`, and its field X in place of `{row.X}`.

    Raises:
        UserError: the row has no such field.
    """

    # Not `str.format`: an instruction may well contain other braces, such as \\boxed{}.
    def fill(place: re.Match[str]) -> str:
        field = place[1]
        if field is None:
            return str(row.fields[data.prompt_field])
        if field not in row.fields:
            there = ", ".join(f'"{name}"' for name in row.fields)
            raise UserError(f'{row.where}: data.instruction asks for {place[0]}: no field "{field}"; it has {there}')
        return _shown(row.fields[field])

    return _PLACE.sub(fill, data.instruction)


def prompt_text(row: Row, data: DataSettings, tokenizer: Any) -> str:
    """The text before the answer.

    Raises:
        UserError: `template = "chat"` and the tokenizer has no chat template; or see `question`.
    """
    content = question(row, data)
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
        answer=_answer(row, data),
        verifier=row_verifier(row, data),
        row=row.fields,
    )


def make_demonstration(
    row: Row, data: DataSettings, completion_field: str, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its worked-out completion, without an end-of-sequence token."""
    ids = prompt_ids(prompt_text(row, data, tokenizer), data, tokenizer)
    return ids, _ids(tokenizer, row.fields[completion_field], add_special_tokens=False)


def _shown(value: Any) -> str:
    """A field in a prompt: texts and numbers as they are, a list one item a line."""
    if isinstance(value, list | tuple):
        return "\n".join(map(_shown, value))
    if isinstance(value, str | float):
        return as_text(value)
    return json.dumps(value, ensure_ascii=False)


def _answer(row: Row, data: DataSettings) -> str:
    """The reference; "" of a row without one, which is asked for only where the verifier compares with it."""
    value = row.fields.get(data.answer_field, "")
    return as_text(value) if isinstance(value, str | int | float) else ""


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    return ids
