"""Are a model's weights safetensors, and whole? Only headers and sizes are read, so it costs nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fleuve.config.nearest import did_you_mean
from fleuve.errors import UserError

INDEX = "model.safetensors.index.json"
_LENGTH = 8
"""Bytes of the little-endian length of the JSON header that follows it; after the header come the tensors."""
_LONGEST_HEADER = 100 * 1024 * 1024


_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def refuse_pickle(directory: Path) -> None:
    """A pickle runs what it likes when it is opened, so no weights are read from one; nor is an adapter taken for a
    model: it may name any other as its base.

    Raises:
        UserError: `directory` holds weights only as pickles, or an adapter.
    """
    if (directory / "adapter_config.json").exists():
        whole = directory.parent / "model"  # as a checkpoint has it
        hint = did_you_mean(str(whole) if (whole / "config.json").exists() else None)
        hint = hint or ": merge it into its base model and save that"
        raise UserError(f"{directory} is an adapter, not a model{hint}")
    if next(directory.glob("*.safetensors"), None) is None:
        pickles = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
        if pickles:
            raise UserError(
                f"{directory / pickles[0]}: a pickle, which can run any program when it is opened, so it is not; save "
                "the model's weights as safetensors"
            )


def check_weights(directory: Path) -> None:
    """Look at every safetensors file of a model directory, and at those that its index names.

    Raises:
        UserError: a shard is missing, or a file is shorter or longer than its header says, or has no header; or see
            `refuse_pickle`.
    """
    refuse_pickle(directory)
    if not (directory / "model.safetensors").exists():
        _check_index(directory / INDEX)
    for path in sorted(directory.glob("*.safetensors")):
        _check_file(path)


def _check_index(path: Path) -> None:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        shards = sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as an index of weights: {error}") from None
    if missing := [name for name in shards if not (path.parent / str(name)).exists()]:
        raise UserError(f"{path}: {len(missing)} of its {len(shards)} files are missing, the first is {missing[0]}")


def _check_file(path: Path) -> None:
    try:
        size, expected = path.stat().st_size, _expected_size(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: corrupt: it does not begin with a safetensors header; fetch the model anew") from None
    if size != expected:
        kind = "truncated" if size < expected else "corrupt"
        raise UserError(f"{path}: {kind}: it has {size:,} bytes, its header says {expected:,}; fetch the model anew")


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """The shapes of all tensors of a model directory whose files are whole (`check_weights`), by name."""
    headers = [_header(path) for path in sorted(directory.glob("*.safetensors"))]
    return {name: tensor["shape"] for header in headers for name, tensor in header.items() if name != "__metadata__"}


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return header


def _expected_size(path: Path) -> int:
    """The bytes that the file must have by its header; ValueError and the like if that is none."""
    with path.open("rb") as file:
        prefix = file.read(_LENGTH)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < _LENGTH or not 0 < length <= _LONGEST_HEADER:
            raise ValueError
        if _LENGTH + length > os.fstat(file.fileno()).st_size:
            return _LENGTH + length  # cut off within the header already
        header: dict[str, Any] = json.loads(file.read(length))
    ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    return _LENGTH + length + max(ends, default=0)
