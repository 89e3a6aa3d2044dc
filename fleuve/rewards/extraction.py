r"""Which part of an answer is *the* answer.

The first of these that is there, and of several the last: `\boxed{...}`, what stands after `####`, what stands after
a `#` on the last line, what stands after "answer is" or "answer:", the last number.
"""

from __future__ import annotations

import re

TAIL = 8192
"""Characters at the end of a text that are looked at: a final answer stands at the end, whatever the length."""

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_HASH = re.compile(r"#\s*([^#\n]*[^#\s])\s*$")
_ANSWER_IS = re.compile(r"\banswer(?:\s+is|\s*:)\s*:?[ \t]*([^\n]+)", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?(?![\d/])%?|(?<![\w.])[-+]?\.\d+"
)
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)")


def extract(text: str) -> str | None:
    r"""The final answer in `text`, as it is written there; None where there is none.

    >>> extract(r"First \boxed{3}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract("2*3=6;6+1=7;#7")
    '7'
    """
    text = text[-TAIL:]
    box = _last_box(text)
    if box is not None:
        return box
    if "####" in text:
        after = text.rpartition("####")[2].strip().partition("\n")[0].strip()
        return after or None
    if match := _HASH.search(text[-1024:]):
        return match[1].strip()
    said = _ANSWER_IS.findall(text)
    if said:
        return _clean_sentence(said[-1]) or None
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def reference(answer: str) -> str:
    r"""The reference answer of a row: extracted if it is a worked solution (`####`, `\boxed{}`), else all of it."""
    if "####" in answer or "\\boxed" in answer:
        return extract(answer) or ""
    return answer.strip()


def _last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{}` that is closed. Braces are counted without recursion; `\{` is no brace."""
    for match in reversed(list(_BOX.finditer(text))[-16:]):
        depth, position = 1, match.end()
        while position < len(text):
            character = text[position]
            if character == "\\":
                position += 1
            elif character == "{":
                depth += 1
            elif character == "}":
                depth -= 1
                if depth == 0:
                    return text[match.end() : position].strip()
            position += 1
    return None


def _clean_sentence(sentence: str) -> str:
    """The rest of a sentence without its end, emphasis marks and math delimiters."""
    if end := _SENTENCE_END.search(sentence):
        sentence = sentence[: end.start()]
    sentence = sentence.strip().strip("*").strip()
    if inline := re.match(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", sentence):
        return next(group for group in inline.groups() if group is not None).strip()
    return sentence
