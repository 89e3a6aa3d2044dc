"""The checkpoint of a trainer of several ranks: `model/` as ever, and a file of each rank's share of the state.

As `checkpoint` does, all is written beside the final names, flushed, then renamed. What goes wrong on one rank is said
by all, after every rank has come to the end: they stay in step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fleuve.train.checkpoint import MODEL, PART, flush, save_model
from fleuve.train.sharded_optimizer import ShardedOptimizer
from fleuve.train.sharding import with_weights
from fleuve.train.state_files import share_name, share_notes


def save(path: Path, optimizer: ShardedOptimizer, version: int, source: str) -> None:
    """Write `path/model` and this rank's share of the trainer's state; by all ranks together. `path` is a directory
    that all of them see.

    Raises:
        OSError: the disk is full on one of them (or whatever the system says). Nothing half-written remains under a
            final name.
    """
    model, ranks = optimizer.model, optimizer.model.ranks
    share = path / share_name(ranks.rank, ranks.count)
    part_share, part_model = share.with_name(share.name + PART), path / (MODEL + PART)

    def write_share() -> None:
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().cpu().contiguous() for name, t in optimizer.state().items()}
        save_file(tensors, part_share, share_notes(version, optimizer.layout))
        flush(part_share)

    weights: dict[str, Tensor] = {}
    for name, weight in model.weights(model.dtype):
        if ranks.leads:
            weights[name] = weight.cpu()

    def write_model() -> None:
        shutil.rmtree(part_model, ignore_errors=True)
        save_model(part_model, with_weights(model, weights), source)
        for file in (*part_model.iterdir(), part_model):
            flush(file)

    def rename() -> None:
        for old in path.glob("trainer*.safetensors") if ranks.leads else ():
            old.unlink()  # of another number of ranks, perhaps
        shutil.rmtree(path / MODEL, ignore_errors=True)
        os.replace(part_model, path / MODEL)

    problem = _tried(write_share) or (_tried(write_model) if ranks.leads else "")
    problem = ranks.first_word(problem) or ranks.first_word(_tried(rename) if ranks.leads else "")
    problem = problem or ranks.first_word(_tried(lambda: os.replace(part_share, share)))
    problem = problem or ranks.first_word(_tried(lambda: flush(path)))
    if problem:
        with contextlib.suppress(OSError):
            part_share.unlink(missing_ok=True)
            if ranks.leads:
                shutil.rmtree(part_model, ignore_errors=True)
            path.rmdir()  # unless there is something else in it
        raise OSError(f"cannot write the checkpoint {path}: {problem}")


def _tried(work: Callable[[], None]) -> str:
    """What went wrong with it, in words; empty if nothing did."""
    try:
        work()
    except (OSError, SafetensorError) as error:
        return str(error)
    return ""
