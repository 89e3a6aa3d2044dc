"""What a run of some settings needs of the machines that it is on."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.rewards.weighted import names
from fleuve.simulate.model_shape import BYTES, load_model_shape

STATE_BYTES = 12
"""Of one parameter in a checkpoint, beside the model itself: fp32 master and AdamW's two moments."""
FILES = 256
"""Open files of a process beside its connections, generously."""


@dataclass(frozen=True)
class Needs:
    """Bytes where nothing else is said; None: not known (no settings, or a model that is not here)."""

    processes: int = 2
    threads: int = 0
    gpus: bool | None = None
    """True: it fails without; None: it takes what there is."""
    bf16: bool = False
    weights: int | None = None
    """Of one version, as it is published."""
    weights_kept: int = 3
    checkpoint: int | None = None
    checkpoints_kept: int = 3
    open_files: int = 4096
    sandbox: str | None = None
    """`reward.code.sandbox`; None: no programs are run."""
    weak_sandbox: bool = False
    ray: bool = False
    vllm: bool = False
    ranks: int = 1


def needs_of(settings: Settings) -> Needs:
    """A version of the weights is written while `weights.keep` others are there; so are checkpoints."""
    rollout, trainer, control = settings.rollout, settings.trainer, settings.control
    try:
        parameters: int | None = load_model_shape(settings.model.path, "model.path").parameters
    except UserError:
        parameters = None
    code = False
    wanted = {rollout.device, trainer.device}
    in_flight = (control.max_staleness + 1) * control.batch_size * rollout.group_size
    with contextlib.suppress(UserError):  # that it is none, `fleuve check` says
        code = "code" in names([settings.data.verifier])
    dtype = BYTES[trainer.dtype]
    return Needs(
        processes=trainer.ranks + rollout.workers,
        threads=trainer.ranks * max(trainer.threads, 1) + rollout.workers * max(rollout.threads, 1),
        gpus=True if "cuda" in wanted else False if wanted == {"cpu"} else None,
        bf16="bfloat16" in (rollout.dtype, trainer.dtype),
        weights=None if parameters is None else parameters * dtype,
        weights_kept=settings.weights.keep + 1,
        checkpoint=None if parameters is None else parameters * (dtype + STATE_BYTES),
        checkpoints_kept=settings.checkpoint.keep + 1,
        open_files=in_flight + FILES,
        sandbox=settings.reward.code.sandbox if code and settings.reward.url is None else None,
        weak_sandbox=settings.reward.code.allow_weak_sandbox,
        ray=settings.launch.backend == "ray",
        vllm=rollout.engine == "vllm",
        ranks=trainer.ranks,
    )
