"""Fleuve's part of a vLLM server, imported by the Python that vLLM lives in.

That Python has its own versions of everything, so Fleuve's environment must not be in its path. The package `fleuve`
alone is made importable here, from where this file lies: what it imports of it (`weights.store`, `launch.child`,
`types`, `wire.confine`) needs only what vLLM requires too: msgspec, numpy, safetensors, torch.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FLEUVE = Path(__file__).resolve().parents[3]


def _mount() -> None:
    """Have `import fleuve` find the package that this one is a part of."""
    if "fleuve" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "fleuve", _FLEUVE / "__init__.py", submodule_search_locations=[str(_FLEUVE)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{_FLEUVE} is no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fleuve"] = module
    spec.loader.exec_module(module)


_mount()
