"""Does every prompt, with the longest answer that is asked for, fit the model's context?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fleuve.config.settings import DataSettings
from fleuve.data.render import prompt_ids, prompt_text
from fleuve.data.rows import Row
from fleuve.errors import UserError


def check_prompts(rows: Iterable[Row], data: DataSettings, tokenizer: Any, context: int, max_new_tokens: int) -> int:
    """The longest prompt in tokens, as the model will read it (chat template included).

    Raises:
        UserError: a prompt and `max_new_tokens` together exceed `context`; names the longest one.
    """
    longest, where, over = 0, "", 0
    for row in rows:
        length = len(prompt_ids(prompt_text(row, data, tokenizer), data, tokenizer))
        over += length + max_new_tokens > context
        if length > longest:
            longest, where = length, row.where
    if over:
        room = context - longest
        advice = f"rollout.max_new_tokens = {room} would fit" if room > 0 else "leave that row out"
        raise UserError(
            f"{where}: a prompt of {longest} tokens and rollout.max_new_tokens = {max_new_tokens} exceed the model's "
            f"context of {context}; so do {over} prompts in all; {advice}"
        )
    return longest
