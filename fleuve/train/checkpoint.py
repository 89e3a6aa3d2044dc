"""The trainer's checkpoint: `model/`, a Hugging Face directory that anything opens, and `trainer.safetensors`; where
adapters learn, also `adapter/`, which peft opens.

The second holds tensors and one number, no pickled objects: opening a checkpoint executes nothing. All are written
beside their final names, flushed to the disk, then renamed; whoever adds more to the directory marks the whole as
committed, last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from fleuve.errors import UserError
from fleuve.modeling.tokenizer import load_tokenizer
from fleuve.train.critic import Critic
from fleuve.train.lora import AdapterOptimizer
from fleuve.train.optimizer import MasterOptimizer
from fleuve.train.ranks import Ranks
from fleuve.train.state_files import WHOLE, StateFiles, state_files

MODEL = "model"
ADAPTER = "adapter"
STATE = WHOLE
_CRITIC = "critic/"
"""What the names of a critic's tensors begin with."""
PART = ".part"
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja")


def save(
    path: Path,
    model: nn.Module,
    optimizer: MasterOptimizer,
    version: int,
    source: str,
    critic: Critic | None = None,
) -> None:
    """Write `path/model` and `path/trainer.safetensors`, and `path/adapter` if adapters learn. `source` is the model
    that training began with; its tokenizer is the new one's too.

    Raises:
        OSError: the disk is full (or whatever the system says), with the path. Nothing half-written remains under a
            final name.
    """
    part_model, part_adapter, part_state = (path / (name + PART) for name in (MODEL, ADAPTER, STATE))
    directories = [part_model, part_adapter] if isinstance(optimizer, AdapterOptimizer) else [part_model]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for part in directories:
            shutil.rmtree(part, ignore_errors=True)
        if isinstance(optimizer, AdapterOptimizer):
            save_model(part_model, optimizer, source)
            optimizer.save_adapter(part_adapter, source)
        else:
            save_model(part_model, model, source)
        state = optimizer.state()
        if critic is not None:
            state |= {_CRITIC + name: t for name, t in critic.state().items()}
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
        save_file(tensors, part_state, {"version": str(version)})
        for file in (*(f for d in directories for f in (*d.iterdir(), d)), part_state):
            flush(file)
        for part in directories:
            final = part.with_suffix("")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(part, final)
        os.replace(part_state, path / STATE)
        flush(path)
    except (OSError, SafetensorError) as error:
        for part in directories:
            shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(OSError):
            part_state.unlink(missing_ok=True)
            path.rmdir()  # unless there is something else in it
        raise OSError(f"cannot write the checkpoint {path}: {error}") from error


def load(path: Path, optimizer: MasterOptimizer, critic: Critic | None = None, ranks: Ranks | None = None) -> int:
    """Restore weights and optimiser state from `path`, and the critic's if there is one; returns the policy version.
    Each of several `ranks` takes its own part.

    A critic in the checkpoint that this run has no use for is left there: the policy is whole without it. A run with a
    critic does not start from a checkpoint without: one that knows nothing would undo what the policy has learnt.

    Raises:
        UserError: there is no trainer state, it cannot be read, or it belongs to another model or to another critic.
    """
    ranks = ranks or Ranks()
    file = state_files(path)[0]
    try:
        with StateFiles(path, optimizer.layout, ranks.rank) as files:
            version, tensors = files.version, dict(files)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is broken or cut off: {' '.join(str(error).split())}") from error
    state = {name.removeprefix(_CRITIC): t for name, t in tensors.items() if name.startswith(_CRITIC)}
    if critic is not None and not state:
        raise UserError(
            f"{file} was written by a run without a critic, and this run has one: start anew from {path / MODEL}"
        )
    try:
        optimizer.restore(tensors)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{file} belongs to another model: {error}") from error
    try:
        if critic is not None:
            critic.restore(state)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{file} belongs to another critic (critic.backbone or critic.path): {error}") from error
    return version


def save_model(path: Path, model: Any, source: str | None) -> None:
    """A Hugging Face directory: config, weights, generation config, and `source`'s tokenizer if one is named.

    Our attention function is not written into the config: `from_pretrained` picks its own.
    """
    model.save_pretrained(path)
    if source is None:
        return
    if not Path(source).is_dir():  # a hub name
        load_tokenizer(source).save_pretrained(path)
        return
    for pattern in _TOKENIZER_FILES:  # copied as they are: loading and saving again may change them
        for file in Path(source).glob(pattern):
            shutil.copyfile(file, path / file.name)


def flush(path: Path) -> None:
    """Have the disk hold a file, or a directory's names."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
