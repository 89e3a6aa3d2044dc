"""docs/algorithms.md names every preset with what it fills in, every choice, and every metric of a loss."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from fleuve.algorithms.diagnostics import BUCKETS, TokenFacts, loss_sums
from fleuve.algorithms.values import value_loss
from fleuve.config.presets import PRESETS
from fleuve.config.settings import AlgorithmSettings

PAGE = (Path(__file__).parent.parent.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def documented_presets() -> dict[str, dict[str, Any]]:
    """Preset → the settings that the page says it fills in."""
    found = {}
    for line in section("Presets").splitlines():
        if match := re.match(r"\| `(\w+)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", line):
            found[match[1]] = tomllib.loads("\n".join(re.findall(r"`(\w+ = [^`]+)`", match[2])))
    return found


def test_every_preset_is_documented_with_what_it_fills_in() -> None:
    assert documented_presets() == PRESETS


CHOICES = [
    (name, choice)
    for name, field in AlgorithmSettings.model_fields.items()
    if get_origin(field.annotation) is Literal
    for choice in get_args(field.annotation)
    if (name, choice) != ("truncated", "keep")  # it does nothing
]


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_every_choice_is_documented(name: str, choice: str) -> None:
    assert f"`{name}" in PAGE
    assert f"`{choice}`" in PAGE


def test_every_metric_of_a_loss_is_documented() -> None:
    one, no = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    metrics = loss_sums(TokenFacts(torch.zeros(1, dtype=torch.int64), no, no, no, one, one, one)).metrics()
    names = {name.partition("/")[2] for name in metrics if name.startswith("loss/")}
    two = torch.tensor([0.0, 1.0])
    _, sums = value_loss(two, two, two.flip(0), torch.ones(2, dtype=torch.bool), denominator=2.0, clip=None)
    names |= set(sums.metrics())
    assert len(names) > 12
    missing = {name for name in names if f"`{name}`" not in section("What the metrics say")}
    assert not missing


def test_every_bucket_of_staleness_is_documented() -> None:
    *buckets, last = (name for _, name in BUCKETS)
    assert f"the buckets are {', '.join(buckets)} and {last}." in " ".join(PAGE.split())
