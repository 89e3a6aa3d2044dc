"""Is there a GPU? Asked of the operating system: torch takes seconds to import."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

TRACES = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
"""Where a driver of NVIDIA (or, on WSL, of Windows; or of AMD, whose GPUs torch calls cuda too) shows itself."""


def no_gpu(key: str) -> str | None:
    """Why `key = "cuda"` cannot work here, in one line; None if it may: the driver's word is torch's to take."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f'{key} = "cuda": CUDA_VISIBLE_DEVICES={visible} hides every GPU; unset it, or use "cpu"'
    if any(Path(trace).exists() for trace in TRACES) or shutil.which("nvidia-smi"):
        return None
    return f'{key} = "cuda": this machine has no GPU, or no driver for it; use "auto" or "cpu"'
