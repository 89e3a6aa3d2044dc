"""`[simulate]`: the cluster, the model's shape, the answers' lengths and the cost models of a run on virtual time.

`fleuve train` ignores these; `fleuve simulate` reads them beside the settings of the run itself. What is not given here
is taken from the run: the model from `model.path`, the layout from `rollout.workers` and `trainer.ranks`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleuve.config.section import NonNegative, Positive, Section, Share

AtLeastZero = Annotated[float, Field(ge=0)]


class LengthSettings(Section):
    """How long answers are. From `file` (a run directory, or one integer a line) or lognormal: `mean` is that of the
    answers as they come, cut off at `rollout.max_new_tokens` (none: 0.3 times that); `sigma` is the standard deviation
    of the logarithm, before the cut-off. `prompt_share` of the variance is the prompt's, the rest each answer's own."""

    file: str | None = None
    mean: Annotated[float, Field(ge=1)] | None = None
    sigma: AtLeastZero = 0.8
    prompt_share: Annotated[float, Field(ge=0, le=1)] = 0.5


class CostSettings(Section):
    """The free constants of the cost models: what real kernels reach of what the data sheets promise. Training reaches
    `train_flops_share · width / (width + train_half_width)`; `switch_seconds` is one change of colocated devices
    between generating and training."""

    bandwidth_share: Share = 0.7
    prefill_flops_share: Share = 0.5
    decode_flops_share: Share = 0.5
    train_flops_share: Share = 0.4
    train_half_width: AtLeastZero = 0.0
    network_share: Share = 0.6
    memory_share: Share = 0.9
    decode_overhead: AtLeastZero = 0.004
    sequence_overhead: AtLeastZero = 5e-6
    allreduce_latency: AtLeastZero = 1e-5
    micro_batch_overhead: AtLeastZero = 0.05
    step_overhead: AtLeastZero = 1.0
    publish_overhead: AtLeastZero = 0.5
    update_overhead: AtLeastZero = 0.5
    switch_seconds: AtLeastZero = 0.0


class MeasuredSettings(Section):
    """Times measured on a real run: each replaces what the cost model would say of it. A decode step of n sequences
    with K tokens in their caches is `decode_base + decode_per_sequence · n + decode_per_kv_token · K`; `per_answer` is
    what an engine loses over one request and its reply, transport and verdict included; training is `train_per_token`
    and `forward_per_token` (the proximal pass) for every token and `train_per_micro_batch`."""

    decode_base: AtLeastZero | None = None
    decode_per_sequence: AtLeastZero | None = None
    decode_per_kv_token: AtLeastZero | None = None
    prefill_per_token: AtLeastZero | None = None
    prefill_base: AtLeastZero | None = None
    per_answer: AtLeastZero | None = None
    update: AtLeastZero | None = None
    train_per_token: AtLeastZero | None = None
    forward_per_token: AtLeastZero | None = None
    train_per_micro_batch: AtLeastZero | None = None
    step: AtLeastZero | None = None
    publish: AtLeastZero | None = None


class SimulateSettings(Section):
    """The run on virtual time. `gpus` of `hardware` in all, `rollout_gpus` of them for engines of `tensor_parallel`
    each, the rest for the trainer, `trainer_parallel` for each micro-batch (colocated: all of them for both, in turn);
    None is what the run's own engines and ranks have. `finish_together`: with
    `rollout.interrupt = "finish"`, no engine takes new weights, or begins an answer, until those of all have ended."""

    model: str | None = None
    hardware: str = "cpu"
    gpus: Positive | None = None
    rollout_gpus: Positive | None = None
    tensor_parallel: Positive | None = None
    trainer_parallel: Positive | None = None
    finish_together: bool = False
    max_running: Positive | None = None
    kv_cache_tokens: Positive | None = None
    prompt_tokens: Positive = 256
    reward_seconds: AtLeastZero = 0.05
    reward_sigma: AtLeastZero = 0.5
    learnt: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: NonNegative = 0
    steps: Positive | None = None
    lengths: LengthSettings = LengthSettings()
    costs: CostSettings = CostSettings()
    measured: MeasuredSettings = MeasuredSettings()
