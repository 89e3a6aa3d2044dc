"""docs/settings.md names every setting, with the default that it really has."""

from __future__ import annotations

import re
from pathlib import Path

from fleuve.config.loader import dump_settings, setting_names
from fleuve.config.settings import Settings

PAGE = Path(__file__).parent.parent.parent / "docs" / "settings.md"


def documented() -> dict[str, str]:
    """Dotted name → default, as the page's tables have them."""
    found, section = {}, ""
    for line in PAGE.read_text(encoding="utf-8").split("## Cores and memory")[0].splitlines():
        if match := re.match(r"## `\[(.*)\]`", line):
            section = f"{match[1]}."
        elif match := re.match(r"\| `(\w+)` \| (.*?) \| .+ \|$", line):
            found[f"{section}{match[1]}"] = match[2].strip("`")
    return found


def test_every_setting_is_documented_with_its_default() -> None:
    minimal = {"run_dir": "R", "model": {"path": "M"}, "data": {"train": "T"}}
    defaults, section = dict.fromkeys(setting_names(Settings), "none"), ""
    for line in dump_settings(Settings.model_validate(minimal)).splitlines():
        if match := re.match(r"\[(.*)\]", line):
            section = f"{match[1]}."
        elif " = " in line:
            name, value = line.split(" = ", 1)
            defaults[f"{section}{name}"] = value
    for required in ("run_dir", "model.path", "data.train"):
        defaults[required] = "required"
    assert documented() == defaults
