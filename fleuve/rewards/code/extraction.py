"""The program in an answer: its last fenced block of Python, or all of it where there is no fence."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})[ \t]*([^\n`]*)$")
_PYTHON = {"", "python", "python3", "py", "py3"}
MAX_PROGRAM = 256 * 1024
"""Characters. A longer program is none."""


def extract_program(text: str) -> str | None:
    """The source of the program that an answer ends with; None if there is none.

    >>> extract_program("First:\\n```python\\nx = 1\\n```\\nBetter:\\n```python\\nx = 2\\n```\\nDone.")
    'x = 2\\n'
    """
    blocks: list[str] = []
    fence, language, lines = "", "", list[str]()
    fenced = False
    for line in text.splitlines():
        match = _FENCE.match(line)
        if not fence and match:
            fence, language, lines, fenced = match[1], match[2].strip().lower(), [], True
        elif fence and match and not match[2].strip() and match[1].startswith(fence):
            if language.split(" ")[0].strip("{}.") in _PYTHON:
                blocks.append("".join(part + "\n" for part in lines))
            fence = ""
        elif fence:
            lines.append(line)
    if not fenced:
        blocks = [text]
    program = blocks[-1] if blocks else ""
    return program if program.strip() and len(program) <= MAX_PROGRAM else None
