"""From text to tokens, in time that the context bounds and not the text's length."""

from __future__ import annotations

from typing import Any

from fleuve.engine.engine import RequestError

PIECE = 1 << 14
"""Characters that are tokenised at a time while it is only looked whether a text may fit."""
DOUBT = 2
"""A text is refused unread if its pieces, tokenised by themselves, have more than so many times the tokens that fit: a
tokenizer may find fewer tokens in the whole than in the pieces, where it cuts at other places, but not half as many."""


def tokens_of(tokenizer: Any, text: str, context: int, special: bool = True) -> list[int]:
    """The tokens of `text`; `special`: with those that the tokenizer adds.

    Raises:
        RequestError: there are so many that they cannot fit `context`. What is a little too long is not found here.
    """
    if len(text) > PIECE:
        _refuse_if_far_too_long(tokenizer, text, context)
    return list(tokenizer.encode(text, add_special_tokens=special))


def _refuse_if_far_too_long(tokenizer: Any, text: str, context: int) -> None:
    found = 0
    for begin in range(0, len(text), PIECE):
        found += len(tokenizer.encode(text[begin : begin + PIECE], add_special_tokens=False))
        if found > DOUBT * context:
            raise RequestError(
                f"the first {min(begin + PIECE, len(text))} of the prompt's {len(text)} characters are {found} tokens, "
                f"and the model's context is {context}"
            )
