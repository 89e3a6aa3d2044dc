"""The program in an answer: its last fenced block of Python, or all of it where there is no fence.

Blocks that are labelled as Python go before those without a label, which may hold what a program prints; and blocks
that are closed go before one that the answer's end cuts off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_PROGRAM = 256 * 1024
"""Characters. A longer program is none."""

_QUOTES = r"(?:[ ]{0,3}>)*"
_FENCE = re.compile(rf"({_QUOTES})([ \t]*)((?:[-*+]|\d{{1,9}}[.)])[ \t]+)?(`{{3,}}|~{{3,}})[ \t]*([^\n`]*)")
_ITEM = re.compile(rf"{_QUOTES}[ \t]*(?:[-*+]|\d{{1,9}}[.)])[ \t]")
_PYTHON = re.compile(r"[{.\s]*(?:python|py)(?:[ ]?\d[\d.]*)?(?![\w+.-])", re.IGNORECASE)
_CODE = re.compile(
    r"(?:async[ ]+)?def[ ]+\w+[ ]*\(|class[ ]+\w+[^.]*:|@\w|import[ ]+[\w., ]+$|from[ ]+[\w.]+[ ]+import\b|[ ]{4}|\t"
)
_MARGIN = 3
"""Spaces before a fence that mean nothing anywhere. With more it is one inside a list, or else no fence."""


@dataclass
class _Block:
    label: str
    fence: str
    quotes: int
    indent: int
    first: int
    lines: list[str] = field(default_factory=list)
    closed: bool = False

    def take(self, line: str) -> None:
        """One more line, which may close it."""
        for _ in range(self.quotes):
            line = re.sub(r"^[ ]{0,3}>", "", line, count=1)
        line = line[min(self.indent, len(line) - len(line.lstrip(" \t"))) :]
        bare = line.strip(" \t")
        if bare.startswith(self.fence) and not bare.strip(self.fence[0]) and _margin(line) <= _MARGIN:
            self.closed = True
        else:
            self.lines.append(line)

    @property
    def source(self) -> str:
        return "".join(line + "\n" for line in self.lines)


def extract_program(text: str) -> str | None:
    """The source of the program that an answer ends with; None if there is none.

    >>> extract_program("First:\\n```python\\nx = 1\\n```\\nBetter:\\n```py\\nx = 2\\n```\\nIt prints:\\n```\\n2\\n```")
    'x = 2\\n'
    """
    text = text.rpartition("</think>")[2].removeprefix("\ufeff").replace("\r\n", "\n")
    lines = text.split("\n")  # nothing else ends a line of Python
    blocks = _blocks(lines)
    if not blocks:
        program = text
    elif not blocks[0].label and (before := _begun(lines[: blocks[0].first])):
        program = before
    else:
        ranked = [block for block in blocks if not block.label or _PYTHON.match(block.label)]
        ranked = [block for block in ranked if block.source.strip()]
        program = max(ranked, key=_rank).source if ranked else ""
    program = program.removeprefix("\ufeff")
    return program if program.strip() and len(program) <= MAX_PROGRAM else None


def _rank(block: _Block) -> tuple[bool, bool, int]:
    return bool(block.label), block.closed, block.first


def _blocks(lines: list[str]) -> list[_Block]:
    blocks: list[_Block] = []
    in_list, quotes = False, {'"""': 0, "'''": 0}
    for number, line in enumerate(lines):
        if blocks and not blocks[-1].closed:
            blocks[-1].take(line)
        elif (match := _FENCE.fullmatch(line)) and not any(count % 2 for count in quotes.values()):
            label = match[5].strip()
            if _margin(match[2]) <= _MARGIN or in_list or _PYTHON.match(label):
                # What an item's text is indented by, its fence's lines are too.
                indent = len(match[2]) + len(match[3] or "")
                blocks.append(_Block(label, match[4], match[1].count(">"), indent, number))
        else:
            in_list = in_list or bool(_ITEM.match(line))
            for mark in quotes:
                quotes[mark] += line.count(mark)
    return blocks


def _begun(before: list[str]) -> str:
    """The lines before a first fence without a label, if they are a program whose own opening fence stands in the
    prompt."""
    filled = [line for line in before if line.strip()]
    return "".join(line + "\n" for line in before) if filled and _CODE.match(filled[0]) else ""


def _margin(line: str) -> int:
    return len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip(" "))
