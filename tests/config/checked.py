"""What `fleuve check` says of settings, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fleuve.config.preflight import preflight
from fleuve.config.settings import Settings
from fleuve.errors import UserError

Make = Callable[..., Settings]
"""Settings of a sound run, with what is given by section in place of its own."""


def problems(settings: Settings) -> list[str]:
    """The lines of the error, without the folder that everything lies in."""
    with pytest.raises(UserError) as caught:
        preflight(settings)
    folder = str(Path(settings.run_dir).parent)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def notes(settings: Settings) -> list[str]:
    """What it passes and remarks on."""
    return [line.removeprefix("note: ") for line in preflight(settings) if not line.startswith("ok: ")]
