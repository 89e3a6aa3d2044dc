"""docs/engines.md names what an engine may do without, as the command line does."""

from __future__ import annotations

import re
from pathlib import Path

from subject import FEATURES

DOCS = Path(__file__).resolve().parents[2] / "docs/engines.md"


def test_the_features_that_may_lack_are_documented() -> None:
    named = re.findall(r"^\| `([a-z-]+)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert named == list(FEATURES)
