"""Every setting of a run, its type, its bounds and its only default.

Imports neither torch nor transformers, so that `fleuve check` answers at once. Reading TOML and flags is `loader.py`;
what needs a look at the disk (models, data, context lengths) is `preflight.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fleuve.config.launching import LaunchSettings
from fleuve.config.lora import LoraSettings
from fleuve.config.presets import PRESETS, Preset
from fleuve.config.rollout import RolloutSettings
from fleuve.config.section import Dtype, NonNegative, Positive, Seconds, Section, Url
from fleuve.config.simulation import SimulateSettings


class ModelSettings(Section):
    """Which model to train: a Hugging Face directory, a hub name, or `builtin:NAME` for one that ships with Fleuve."""

    path: str


class DataSettings(Section):
    """Where prompts come from: a `.jsonl` path, or `procedural:NAME[?key=value&...]`."""

    train: str
    eval: str | None = None
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    verifier: str = "math"
    template: Literal["none", "chat"] = "none"
    system_prompt: str | None = None
    instruction: str = "{prompt}"
    shuffle: bool = True


class ControlSettings(Section):
    """The asynchronous heart: groups per step, the bound on staleness, what to do with overdue groups."""

    batch_size: Positive = 16
    max_staleness: NonNegative = 2
    overdue: Literal["wait", "mask", "train", "drop"] = "wait"
    group_timeout: Seconds = 1800.0
    max_failures_in_a_row: Positive = 16


class TrainerSettings(Section):
    """The optimiser step. `token_budget` is the hard cap on the tokens of one packed micro-batch. Of several `ranks`
    each holds a share of the weights and computes a share of every minibatch."""

    ranks: Positive = 1
    context_parallel: Positive = 1
    tensor_parallel: Positive = 1
    threads: NonNegative = 0
    minibatches: Positive = 2
    token_budget: Positive = 8192
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: NonNegative = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    dtype: Dtype = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    logprob_chunk: Positive = 1024
    activation_checkpointing: bool = False
    offload: bool = False
    max_nonfinite_in_a_row: Positive = 3
    step_timeout: Seconds = 3600.0
    rank_timeout: Seconds = 300.0
    health_timeout: Seconds = 120.0
    start_timeout: Seconds = 180.0

    @model_validator(mode="after")
    def _groups_are_whole(self) -> TrainerSettings:
        if self.tensor_parallel > 1 and self.ranks % (self.context_parallel * self.tensor_parallel):
            raise ValueError(
                f"trainer.ranks = {self.ranks} is not divisible by trainer.context_parallel × trainer.tensor_parallel "
                f"= {self.context_parallel} × {self.tensor_parallel}, the ranks that compute each micro-batch together"
            )
        if self.ranks % self.context_parallel:
            raise ValueError(
                f"trainer.ranks = {self.ranks} is not divisible by trainer.context_parallel = {self.context_parallel}, "
                "the number of ranks that share each micro-batch"
            )
        return self

    @property
    def sharded(self) -> bool:
        """Whether weights are shared out; one rank by itself does that to keep its share in host memory."""
        return self.ranks > 1 or self.offload


class AlgorithmSettings(Section):
    """Advantages, the loss, and what is done about data of older policies: `fleuve.algorithms` has the formulas.

    A preset fills in what is not given (see `presets`).
    """

    preset: Preset = "grpo"

    baseline: Literal["group", "leave_one_out", "none", "critic"] = "group"
    normalise: Literal["group", "batch", "none"] = "group"
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0

    objective: Literal["ppo", "gspo", "cispo", "sapo", "policy_gradient"] = "ppo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    aggregation: Literal["token_mean", "answer_mean", "constant"] = "token_mean"
    horizon: Positive | None = None

    proximal: Literal["recompute", "interpolate", "behaviour"] = "recompute"
    cap: Literal["mask", "clamp", "second_moment", "none"] = "mask"
    cap_level: Literal["token", "sequence"] = "token"
    cap_value: Annotated[float, Field(ge=1)] = 5.0
    cap_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    second_moment_budget: Annotated[float, Field(gt=0)] = 0.04

    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    reference: str | None = None
    entropy_coefficient: float = 0.0

    dynamic_sampling: bool = False
    truncated: Literal["keep", "exclude"] = "keep"
    overlong_buffer: Annotated[float, Field(ge=0)] = 0.0
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    reward_scale: Annotated[float, Field(gt=0)] = 1.0
    reward_clip: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("preset", ""), str):
            return given
        return {**PRESETS.get(given.get("preset", "grpo"), {}), **given}

    @model_validator(mode="after")
    def _buffer_is_a_share(self) -> AlgorithmSettings:
        if self.overlong_buffer >= 1:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.overlong_buffer:g}: must be less than 1; it is a share of "
                "rollout.max_new_tokens"
            )
        return self

    @model_validator(mode="after")
    def _groups_have_a_spread_of_their_own(self) -> AlgorithmSettings:
        if self.normalise == "group" and self.baseline != "group":
            raise ValueError(
                f'algorithm.normalise = "group" divides by the spread within a group, which goes with '
                f'algorithm.baseline = "group"; with "{self.baseline}" it is "batch" or "none"'
            )
        return self

    @model_validator(mode="after")
    def _second_moment_needs_the_proximal(self) -> AlgorithmSettings:
        if self.cap == "second_moment" and self.proximal != "recompute":
            raise ValueError(
                f'algorithm.cap = "second_moment" looks at a whole minibatch\'s weights before it begins, which needs '
                f'algorithm.proximal = "recompute", not "{self.proximal}"'
            )
        return self

    @property
    def regularised(self) -> bool:
        """Whether an answer without any advantage has a gradient all the same."""
        return self.entropy_coefficient != 0 or (self.kl_coefficient > 0 and self.kl_in == "loss")


class CriticSettings(Section):
    """The value model of `algorithm.baseline = "critic"`: on a backbone of its own, or on the policy's (`shared`).
    `coefficient` is the value loss's share in a shared backbone; in the first `warmup_steps` only the critic learns."""

    backbone: Literal["own", "shared"] = "own"
    path: str | None = None
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    clip: Annotated[float, Field(ge=0)] = 0.2
    coefficient: Annotated[float, Field(gt=0)] = 0.1
    warmup_steps: NonNegative = 0


class CodeSettings(Section):
    """How programs are checked, where the verifier is `code`. `sandbox`: "auto" takes the best that this machine has;
    the weakest has to be allowed. Of each program: seconds on the clock and of CPU time; then its score is 0."""

    sandbox: Literal["auto", "namespaces", "limits"] = "auto"
    allow_weak_sandbox: bool = False
    score: Literal["all", "fraction"] = "all"
    seconds: Seconds = 4.0
    cpu_seconds: Seconds = 2.0
    memory_mb: Positive = 512
    processes: Positive = 8
    output_kb: Positive = 1024
    scratch_mb: Positive = 16


class RewardSettings(Section):
    """The pool of verifier processes. `path` is a directory that they import from beside the current one.
    `deadline` is per check and starts when the check starts; `memory_gb` bounds what one process may allocate (0: no
    bound). A process is replaced by a fresh one after `recycle_after` checks, or once it has grown past `recycle_mb`
    (0: never). With `url` the pool is another machine's (`fleuve rewards serve`), and `deadline` its own."""

    path: str | None = None
    url: Url | None = None
    workers: Positive = 1
    deadline: Seconds = 5.0
    queue_timeout: Seconds = 600.0
    queue_size: Positive = 4096
    queue_mb: Annotated[float, Field(gt=0)] = 256.0
    start_timeout: Seconds = 60.0
    memory_gb: Annotated[float, Field(ge=0)] = 4.0
    recycle_after: NonNegative = 10000
    recycle_mb: Annotated[float, Field(ge=0)] = 1024.0
    code: CodeSettings = CodeSettings()


class WeightsSettings(Section):
    """How weights travel: through shared memory on one machine, any directory both sides see, or broadcast from the
    trainer to all workers at once, in buckets of `bucket_mb`; who is not there in `broadcast_timeout`, or gets none for
    so long, takes the file."""

    transport: Literal["shared_memory", "path", "broadcast"] = "shared_memory"
    path: str | None = None
    keep: Positive = 2
    bucket_mb: Positive = 64
    broadcast_timeout: Seconds = 20.0

    @property
    def parent(self) -> str | None:
        """In which directory they are published; None: in shared memory."""
        return None if self.transport == "shared_memory" else self.path

    @model_validator(mode="after")
    def _path_is_given(self) -> WeightsSettings:
        if self.transport == "path" and self.path is None:
            raise ValueError('weights.transport = "path" needs weights.path, a directory that trainer and workers see')
        return self


class CheckpointSettings(Section):
    """Checkpoints are written every `every` steps (0: never by steps) and every `every_minutes` (0: never by time), and
    at the end; the newest `keep` are kept."""

    every: NonNegative = 0
    every_minutes: Annotated[float, Field(ge=0)] = 10.0
    keep: Positive = 2


class EvaluateSettings(Section):
    """Evaluation during a run, on `data.eval`: before the first step, every `every` steps, and after the last."""

    every: NonNegative = 0
    problems: Positive = 64
    samples: Positive = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0


class ObserveSettings(Section):
    """What is written down and shown."""

    live: Literal["auto", "on", "off"] = "auto"
    tensorboard: bool = True
    rollouts: bool = True
    trace: bool = True


class Settings(Section):
    """A training run: `fleuve train CONFIG`."""

    run_dir: str
    steps: Positive = 80
    seed: NonNegative = 0
    model: ModelSettings
    data: DataSettings
    rollout: RolloutSettings = RolloutSettings()
    control: ControlSettings = ControlSettings()
    trainer: TrainerSettings = TrainerSettings()
    lora: LoraSettings = LoraSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    critic: CriticSettings = CriticSettings()
    reward: RewardSettings = RewardSettings()
    weights: WeightsSettings = WeightsSettings()
    launch: LaunchSettings = LaunchSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    observe: ObserveSettings = ObserveSettings()
    simulate: SimulateSettings = SimulateSettings()

    @property
    def reproducible(self) -> bool:
        """Whether the run is the same each time, bit for bit: synchronous, with a single worker."""
        return self.control.max_staleness == 0 and self.rollout.workers == 1

    @property
    def longest_pause(self) -> float:
        """Seconds for which an answer may stand still: colocated, for as long as the trainer has the machine."""
        return self.trainer.step_timeout if self.launch.placement == "colocated" else 0.0

    @model_validator(mode="after")
    def _policy_is_trained(self) -> Settings:
        if self.algorithm.baseline == "critic" and self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps = {self.critic.warmup_steps}: only the critic would learn in all of the "
                f"steps = {self.steps}; give it fewer"
            )
        return self

    @model_validator(mode="after")
    def _critic_is_not_shared_out(self) -> Settings:
        if self.algorithm.baseline == "critic" and self.trainer.sharded:
            key = f"trainer.ranks = {self.trainer.ranks}" if self.trainer.ranks > 1 else "trainer.offload = true"
            raise ValueError(
                f'{key}: a critic\'s weights are not shared out; with algorithm.baseline = "critic" a trainer has one '
                "rank and does not offload"
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_not_shared_out(self) -> Settings:
        if self.lora.rank and self.trainer.sharded:
            key = f"trainer.ranks = {self.trainer.ranks}" if self.trainer.ranks > 1 else "trainer.offload = true"
            raise ValueError(
                f"{key}: adapters are not shared out; with lora.rank = {self.lora.rank} a trainer has one rank and "
                "does not offload"
            )
        return self

    @model_validator(mode="after")
    def _minibatches_divide_batch(self) -> Settings:
        batch, minibatches = self.control.batch_size, self.trainer.minibatches
        if batch % minibatches:
            divisors = [d for d in range(1, batch + 1) if batch % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - minibatches))
            raise ValueError(
                f"control.batch_size = {batch} is not divisible by trainer.minibatches = {minibatches}; "
                f"the nearest that divides it is trainer.minibatches = {nearest}"
            )
        return self


class SftModelSettings(Section):
    """The model to start from, or the architecture to build anew (`config`: Hugging Face config fields) and its
    character-level tokenizer's `alphabet`. `save` is where the Hugging Face directory is written."""

    path: str | None = None
    config: dict[str, object] | None = None
    alphabet: str | None = None
    save: str

    @model_validator(mode="after")
    def _one_source(self) -> SftModelSettings:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either model.path (start from it) or model.config (build it anew), not both")
        if self.config is not None and self.alphabet is None:
            raise ValueError("model.config needs model.alphabet, the characters of its tokenizer")
        return self


class SftSettings(Section):
    """A supervised run: `fleuve sft CONFIG`. Rows need a prompt and a `completion_field`; the loss is on the latter."""

    run_dir: str
    steps: Positive = 1000
    seed: NonNegative = 0
    batch_size: Positive = 128
    completion_field: str = "completion"
    model: SftModelSettings
    data: DataSettings
    trainer: TrainerSettings = TrainerSettings(minibatches=1, learning_rate=2e-3, warmup_steps=20)

    @model_validator(mode="after")
    def _one_rank(self) -> SftSettings:
        if self.trainer.sharded:
            raise ValueError("trainer.ranks, trainer.offload: fleuve sft trains with one rank, on its device")
        return self
