r"""Which part of an answer is *the* answer.

The first of these that is there, and of several the last: `\boxed{...}`, `<answer>...</answer>`, what stands after
`####`, what stands after a `#` on the last line, what stands after "answer is", "answer:" or "option is", the last
number or formula between math delimiters, whichever ends later.
"""

from __future__ import annotations

import re

from fleuve.rewards.spelling import INVISIBLE

TAIL = 8192
"""Characters at the end of a text that are looked at: a final answer stands at the end, whatever the length."""

_BOX = re.compile(r"\\f?box(?:ed)?\s*(?:\{|([0-9a-zA-Z]+))")
_TAG = re.compile(r"<answer>([^<]*)</answer>", re.IGNORECASE)
_HASH = re.compile(r"#\s*([^#\n]*[^#\s])\s*$")
_ANSWER_IS = re.compile(
    r"\b(?:answer|(?:option|choice)(?=\s+is))(?:\s+is(?:\s+(?:therefore|thus|then|simply))?|\s*:)"
    r"(?:\*\*)?\s*:?[ \t]*(?=([^\n]+)|\n\s*([^\n]+))",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?\$?(?:\d+\s+(?=\d+\s*/))?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
    r"(?:\.\d+)?(?:[eE][-+]?\d+(?!\w))?(?:\s*/\s*\d+)?(?![\d/])%?|(?<![\w.])[-+]?\.\d+"
)
# As in Markdown, so that `$5 and $7` is no formula.
_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|(?<!\\)\$(?!\s)((?:\\.|[^$\\\n])+?)(?<!\s)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?:\s|$)")


def extract(text: str) -> str | None:
    r"""The final answer in `text`, as it is written there; None where there is none.

    >>> extract(r"First \boxed{3}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract("2*3=6;6+1=7;#7")
    '7'
    """
    text = INVISIBLE.sub("", text[-TAIL:])
    box = _last_box(text)
    if box is not None:
        return box
    if tagged := _TAG.findall(text):
        return tagged[-1].strip() or None
    if "####" in text:
        after = text.rpartition("####")[2].strip().partition("\n")[0].strip()
        return after or None
    if match := _HASH.search(text[-1024:]):
        return match[1].strip()
    said = _ANSWER_IS.findall(text)
    if said:
        return _clean_sentence(said[-1][0].strip() or said[-1][1]) or None
    return _last_expression(text)


def _last_expression(text: str) -> str | None:
    """The last number, or the last formula if that ends later."""
    number, formula = _last(_NUMBER, text), _last(_FORMULA, text)
    if formula is not None and (number is None or formula.end() >= number.end()):
        return next(group for group in formula.groups() if group is not None).strip() or None
    return number[0] if number is not None else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    match = None
    for match in pattern.finditer(text):  # noqa: B007
        pass
    return match


def reference(answer: str) -> str:
    r"""The reference answer of a row: extracted if it is a worked solution (`####`, `\boxed{}`), else all of it."""
    answer = INVISIBLE.sub("", answer)
    if "####" in answer or "\\boxed" in answer:
        return extract(answer) or ""
    return answer.strip()


def _last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{}` that is closed. Braces are counted without recursion; `\{` is no brace."""
    for match in reversed(list(_BOX.finditer(text))[-16:]):
        if match[1] is not None:  # `\boxed 7`, without braces
            return match[1]
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
    if inline := re.match(r"\$((?:\\.|[^$\\])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", sentence):
        return next(group for group in inline.groups() if group is not None).strip()
    return sentence
