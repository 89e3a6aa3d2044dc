"""What the page on operations says is shown by a test that there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(test_\w+)(?:…)?`", page))
    files = set(re.findall(r"`(tests/[\w/]+\.py)`", page))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert names
    assert [name for name in sorted(names) if f"def {name}" not in source] == []
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
