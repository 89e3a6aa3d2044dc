"""A safetensors file, written tensor by tensor as they come: none of them is held once it is on its way.

The format begins with a header that says where everything lies, which is known only at the end; so room is left for it,
and what it does not need is spaces; a short file is copied without them. Format:
https://github.com/huggingface/safetensors (8 bytes of length, little endian; JSON; the tensors' bytes one after the
other, without gaps).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

ROOM = 1 << 18
"""Bytes for the header: 2,500 tensors. One that is longer has the file copied once."""

SHORT = 1 << 24
"""Bytes of tensors up to which a file is copied once anyway, so that it is not made longer by spaces."""

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]) -> None:
    """Write `path`, with `metadata` in its header.

    Raises:
        OSError: no space left.
        ValueError: a tensor is no floating-point one.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    with path.open("wb") as file:
        file.seek(8 + ROOM)
        at = 0
        for name, tensor in tensors:
            if tensor.dtype not in _NAMES:
                raise ValueError(f"{name} is {tensor.dtype}: weights are floating-point numbers")
            content = tensor.detach().cpu().contiguous()
            size = content.numel() * content.element_size()
            if size:
                file.write(content.reshape(-1).view(torch.uint8).numpy().data)
            header[name] = {
                "dtype": _NAMES[content.dtype],
                "shape": list(content.shape),
                "data_offsets": [at, at + size],
            }
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) <= ROOM and at > SHORT:
            _head(file, text, ROOM)
            return
    longer = path.with_name(f"{path.name}.longer")
    try:
        with path.open("rb") as short, longer.open("wb") as file:
            _head(file, text, -(-len(text) // 8) * 8)
            short.seek(8 + ROOM)
            shutil.copyfileobj(short, file, 1 << 24)
        os.replace(longer, path)
    finally:
        longer.unlink(missing_ok=True)


def _head(file: BinaryIO, text: bytes, room: int) -> None:
    file.seek(0)
    file.write(room.to_bytes(8, "little") + text.ljust(room))
