"""`[lora]`: adapters that learn in place of the model's own weights, and what can be known of them beforehand."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import Field

from fleuve.config.library import require
from fleuve.config.models import ModelFacts
from fleuve.config.nearest import did_you_mean, nearest
from fleuve.config.section import NonNegative, Section
from fleuve.config.weight_files import tensor_shapes
from fleuve.errors import UserError


class LoraSettings(Section):
    """Each matrix of the linear layers is W0 + (alpha / rank)·B·A, of which only A [rank, in] and B [out, rank] learn.
    `rank` 0: all weights learn. `modules` are the last parts of the layers' names, such as "q_proj"; none: all linear
    layers but the output head."""

    rank: NonNegative = 0
    alpha: Annotated[float, Field(gt=0)] = 32.0
    modules: tuple[str, ...] = ()


def require_peft() -> None:
    """
    Raises:
        UserError: peft is not installed here.
    """
    require("peft", 'lora.rank needs peft, which is not installed: pip install "peft>=0.18.1"')


def lora_problems(lora: LoraSettings, model: ModelFacts | None) -> list[str]:
    """Why adapters cannot be trained here, a line each; `model` is None where there is none to look at."""
    if not lora.rank:
        return []
    problems = []
    try:
        require_peft()
    except UserError as error:
        problems.append(str(error))
    if model is not None and model.directory is not None and (layers := _layers(model)):
        problems += unknown_modules(lora.modules, layers)
    return problems


def lora_summary(lora: LoraSettings) -> list[str]:
    """What learns, in a line; none where it is all weights."""
    if not lora.rank:
        return []
    where = ", ".join(lora.modules) or "all linear layers but the output head"
    return [f"adapters of rank {lora.rank} (alpha {lora.alpha:g}) learn, and are all that is published: {where}"]


def lora_notes(lora: LoraSettings, model: ModelFacts) -> list[str]:
    """What is given without effect, or is more than can have one."""
    if not lora.rank:
        unused = [name for name in ("alpha", "modules") if name in lora.model_fields_set]
        return [f"lora.{name} has no effect: lora.rank is 0, so all weights learn" for name in unused]
    shapes = _layers(model) if model.directory is not None else {}
    most = max((min(shape) for name, shape in shapes.items() if not lora.modules or name in lora.modules), default=0)
    if 0 < most < lora.rank:
        return [
            f"lora.rank = {lora.rank}: no matrix that has adapters is of a rank above {most}; more only costs memory, "
            "and 8 to 64 is usual"
        ]
    return []


def unknown_modules(modules: Collection[str], layers: Collection[str]) -> list[str]:
    """A line for each of `modules` that is not among the last parts of the names of linear `layers`."""
    lines = []
    for name in modules:
        if name not in layers:
            near = nearest(name, layers)
            hint = did_you_mean(near) if near else f"; it has {', '.join(sorted(layers))}"
            lines.append(f'lora.modules: the model has no linear layers called "{name}"{hint}')
    return lines


def _layers(model: ModelFacts) -> dict[str, tuple[int, ...]]:
    """The last parts of the names of the linear layers in the model's directory, and what shape they have: matrices of
    its numbered layers (so neither the embedding nor the head)."""
    assert model.directory is not None
    found = {}
    for name, shape in tensor_shapes(model.directory).items():
        *path, last, end = ["", *name.split(".")]
        if end == "weight" and len(shape) == 2 and any(part.isdecimal() for part in path):
            found[last] = tuple(shape)
    return found
