"""Which settings may change when a run is continued, and which would make it another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from fleuve.config.settings import Settings

FIXED = {
    "seed": "it orders the data and seeds the sampling",
    "model.path": "the weights would be those of another model",
    "data.train": "the position in the data would be that of other data",
    "data.prompt_field": "the prompts would be others",
    "data.answer_field": "the reference answers would be others",
    "data.verifier": "rewards before and after could not be compared",
    "data.template": "the prompts would be others",
    "data.system_prompt": "the prompts would be others",
    "data.instruction": "the prompts would be others",
    "data.shuffle": "the order of the data would be another",
    "rollout.group_size": "groups in flight have the size that they were admitted with",
    "rollout.temperature": "answers in flight were sampled at the other one",
    "rollout.top_p": "answers in flight were sampled with the other one",
    "rollout.top_k": "answers in flight were sampled with the other one",
    "rollout.stop": "answers in flight were ended by the others",
    "control.batch_size": "what was admitted is counted in batches of that size",
    "lora.rank": "the checkpoint has adapters of another rank, or none",
    "lora.alpha": "the adapters in the checkpoint would count otherwise",
    "lora.modules": "the adapters in the checkpoint are of other layers",
    "algorithm.baseline": "the checkpoint has a critic, or has none",
    "algorithm.reference": "divergence would be measured to another model",
    "critic.backbone": "the critic in the checkpoint is of the other kind",
    "critic.path": "the critic in the checkpoint is another",
}
"""What must not change, and why."""

TRAINING = (
    "trainer.",
    "algorithm.",
    "critic.",
    "control.max_staleness",
    "control.overdue",
    "rollout.max_new_tokens",
)
"""What a training step depends on: steps that are made once more are made by the former values."""

WHERE = (
    "threads",
    "ranks",
    "context_parallel",
    "tensor_parallel",
    "device",
    "offload",
    "activation_checkpointing",
    "step_timeout",
    "rank_timeout",
    "health_timeout",
    "start_timeout",
)
"""Of the trainer's settings, what it is run with, not what a step comes to (up to rounding). The new values hold at
once: with the former ones it may not even start where the run is now."""


class Changes:
    """The differences between two settings, by dotted name: `(former, new)`."""

    def __init__(self, former: Settings, new: Settings) -> None:
        self.former, self.new = former, new
        old_values, new_values = _flat(former), _flat(new)
        self.values: dict[str, tuple[Any, Any]] = {
            name: (old_values.get(name), new_values.get(name))
            for name in sorted(old_values | new_values)
            if old_values.get(name) != new_values.get(name) and name != "run_dir"
        }

    def refused(self) -> list[str]:
        """The changes that make it another run, a line each."""
        lines = [
            f"{name} was {_shown(old)} and is now {_shown(new)}: {FIXED[name]}"
            for name, (old, new) in self.values.items()
            if name in FIXED
        ]
        old, new = self.values.get("control.max_staleness", (0, 0))
        if new < old:
            lines.append(
                f"control.max_staleness was {old} and is now {new}: more groups are in flight than that lets in; "
                "it can only be raised"
            )
        return lines

    def taken_over(self) -> list[str]:
        """The others, a line each."""
        return [
            f"{name} was {_shown(old)} and is {_shown(new)} from here on"
            for name, (old, new) in self.values.items()
            if name not in FIXED
        ]

    def for_former_steps(self) -> Settings:
        """The new settings, for a run that is where they say, with those of the former that a step depends on."""
        old, new = self.former, self.new
        control = {name: getattr(old.control, name) for name in ("max_staleness", "overdue")}
        return new.model_copy(
            update={
                "trainer": old.trainer.model_copy(update={name: getattr(new.trainer, name) for name in WHERE}),
                "algorithm": old.algorithm,
                "critic": old.critic,
                "control": new.control.model_copy(update=control),
                "rollout": new.rollout.model_copy(update={"max_new_tokens": old.rollout.max_new_tokens}),
            }
        )

    @property
    def of_training(self) -> bool:
        """Whether a training step would come to something else."""
        where = {f"trainer.{name}" for name in WHERE}
        return any(name.startswith(TRAINING) and name not in where for name in self.values)


def _flat(model: BaseModel, prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            values |= _flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Sequence):
        return str(list(value))
    return "not set" if value is None else str(value)
