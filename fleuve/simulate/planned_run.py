"""The run that `fleuve plan` is to find a plan for: from the command line's words to settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleuve.config.loader import parse_overrides, settings_from
from fleuve.config.models import inspect_model
from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.simulate.hardware import catalogue_models, load_hardware
from fleuve.simulate.model_shape import load_model_shape

PATIENCE = 86_400.0
"""Seconds that a planned run waits for a long answer or a long step, in place of the defaults for small models."""

SEARCHED = (
    "control.max_staleness",
    "launch.placement",
    "rollout.vllm.tensor_parallel",
    "rollout.workers",
    "simulate.rollout_gpus",
    "simulate.tensor_parallel",
    "simulate.trainer_parallel",
    "trainer.activation_checkpointing",
    "trainer.context_parallel",
    "trainer.ranks",
    "trainer.tensor_parallel",
    "trainer.token_budget",
)
"""Settings that a plan consists of."""

OPTIONS = {
    "control.batch_size": "--batch",
    "data.train": "--data",
    "rollout.group_size": "--group-size",
    "rollout.max_new_tokens": "--answer",
    "simulate.gpus": "--gpus",
    "simulate.hardware": "--hardware",
    "simulate.model": "MODEL",
    "simulate.prompt_tokens": "--prompt",
    "steps": "--steps",
}
"""Settings that are an option of their own."""


def planned_run(
    model: str,
    gpus: int,
    hardware: str,
    prompt_tokens: int,
    max_new_tokens: int,
    batch_size: int,
    group_size: int,
    steps: int,
    data: str | None = None,
    flags: Sequence[str] = (),
) -> Settings:
    """The run that is to be planned, in bf16; dotted `flags` change any other setting of it.

    Raises:
        UserError: one line a mistake: an unknown model or device, or settings that cannot be.
    """
    path, shape = _model(model)
    _check_flags(flags, own_path=shape is not None)
    load_model_shape(model, "MODEL")
    minibatches = max(m for m in (1, 2, 4) if batch_size % m == 0)
    values: dict[str, Any] = {
        "run_dir": "runs/planned",
        "steps": steps,
        "model": {"path": path},
        "data": {"train": data or "procedural:chain"},
        "rollout": {
            "engine": "embedded" if hardware.lower() == "cpu" else "vllm",
            "dtype": "bfloat16",
            "group_size": group_size,
            "max_new_tokens": max_new_tokens,
            "request_timeout": PATIENCE,
        },
        "control": {"batch_size": batch_size, "group_timeout": PATIENCE},
        "trainer": {"dtype": "bfloat16", "minibatches": minibatches, "step_timeout": PATIENCE},
        "simulate": {"hardware": hardware, "gpus": gpus, "prompt_tokens": prompt_tokens},
    }
    if shape is not None:
        values["simulate"]["model"] = shape
    settings = settings_from(Settings, values, flags, "plan")
    load_hardware(settings.simulate.hardware, "--hardware")
    return settings


def _model(model: str) -> tuple[str, str | None]:
    """`model.path` and, where that does not say it, `simulate.model`: of a name of the catalogue, of a file (the model
    is the directory that it lies in), or of a directory."""
    source = catalogue_models().get(model.lower())
    if source is not None:
        return source["hub"], model.lower()
    file = Path(model).expanduser()
    if not file.is_file():
        return model, None
    return str(file.parent), None if file.name == "config.json" else str(file)


def _check_flags(flags: Sequence[str], own_path: bool) -> None:
    """Whether none says what the plan is to find, or what another option says.

    Args:
        own_path: `model.path` does not say what the model looks like, and may be another.
    """
    for key in parse_overrides(flags):
        if key in SEARCHED:
            bound = "; --max-staleness bounds it" if key == "control.max_staleness" else ""
            raise UserError(f"--{key} is for the plan to find{bound}; leave it out")
        option = "MODEL" if key == "model.path" and not own_path else OPTIONS.get(key)
        if option is not None:
            raise UserError(f"--{key} is what {option} says; leave --{key} out")


def shares_gpus(settings: Settings) -> bool:
    """Whether rollout and training take turns on several GPUs, which `fleuve simulate` knows and `fleuve train` does
    not: Ray gives each process devices of its own, and without it nobody hands out GPUs."""
    in_turn = settings.launch.placement == "colocated"
    return in_turn and settings.rollout.engine == "vllm" and (settings.simulate.gpus or 1) > 1


def unready(settings: Settings) -> str:
    """Why the run cannot be trained as planned, and what to set; empty if it can."""
    if shares_gpus(settings):
        return 'launch.placement = "colocated" on several GPUs is simulated, not trained: give it more of them'
    try:
        inspect_model(settings.model.path)
    except UserError as error:
        return f"{error}. Set model.path to the model's directory, or its name on the hub, before fleuve train"
    return ""
