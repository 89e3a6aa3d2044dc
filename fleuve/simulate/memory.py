"""What has to fit into one device: an engine's weights, workspace and KV cache; a trainer's state and activations.

All of it in bytes of one device. What is counted, and from where, is said in each function; what the libraries need
beside it is `RESERVED`, and the allocator's waste is what `simulate.costs.memory_share` leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleuve.config.settings import Settings
from fleuve.simulate.hardware import Hardware
from fleuve.simulate.layout import Layout
from fleuve.simulate.model_shape import BYTES, ModelShape

RESERVED = 2e9
"""Bytes of a GPU that context, collective buffers and kernels' workspace take: 1 to 3 GB are usual."""

MASTER_BYTES = 16
"""Of one parameter in the optimiser: an fp32 master, its gradient's sum, AdamW's two moments."""

MAX_RUNNING = 2048
"""Answers of one engine on a cluster at the same time when nobody says: the KV cache is to be the bound."""

LOGIT_BYTES = 12
"""Of one logit while a log-probability's gradient is computed: itself, its softmax, its gradient, in fp32."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one device of an engine. `kv_tokens` is the whole engine's room, negative where even the rest does not
    fit; `state` is a colocated trainer's."""

    weights: float
    workspace: float
    state: float
    kv_token: float
    available: float

    @property
    def kv_tokens(self) -> int:
        return int((self.available - self.weights - self.workspace - self.state) / self.kv_token)


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one device of the trainer, at the peak of a micro-batch of the full token budget; `engine` is a
    colocated engine's weights."""

    state: float
    gathered: float
    activations: float
    logits: float
    engine: float
    reserved: float
    available: float

    @property
    def total(self) -> float:
        return self.state + self.gathered + self.activations + self.logits + self.engine + self.reserved

    @property
    def fits(self) -> bool:
        return self.total <= self.available


def max_running(settings: Settings) -> int:
    """Answers that one engine generates at the same time."""
    simulate = settings.simulate
    return simulate.max_running or (settings.rollout.max_running if simulate.gpus is None else MAX_RUNNING)


def engine_memory(settings: Settings, hardware: Hardware, shape: ModelShape, layout: Layout) -> EngineMemory:
    """Of one engine: its share of the weights; one prefill chunk's hidden states and the logits of every running answer
    (in fp32, twice: themselves and what is sampled from); the rest is the KV cache. Key-value heads that are fewer
    than the devices are held more than once. Colocated, the trainer's state stays where it is; what it needs beside
    that during a step it takes from the cache, if that is empty then or is going to be computed anew."""
    rollout = settings.rollout
    bytes_each, devices = BYTES[rollout.dtype], layout.tensor_parallel
    chunk = rollout.prefill_tokens * (4 * shape.hidden + 3 * shape.intermediate / devices) * bytes_each
    logits = max_running(settings) * shape.vocab * 8 / devices
    return EngineMemory(
        weights=shape.weight_bytes(rollout.dtype) / devices,
        workspace=_reserved(hardware) + chunk + logits,
        state=_beside_engine(settings, hardware, shape, layout) if layout.colocated else 0.0,
        kv_token=shape.kv_bytes(rollout.dtype) / min(devices, shape.kv_heads),
        available=hardware.memory * settings.simulate.costs.memory_share,
    )


def trainer_memory(settings: Settings, hardware: Hardware, shape: ModelShape, layout: Layout) -> TrainerMemory:
    """Of a trainer that is sharded over all its devices: weights, gradients and optimiser are each device's share of
    the model; two layers (one computed, one fetched ahead), embeddings and output head are gathered at a time.

    Of the devices that share a micro-batch, those that do not share its tokens share layers: each gathers a part of
    them, but embeddings and output head whole, for which tokens are shared."""
    trainer = settings.trainer
    bytes_each, split = BYTES[trainer.dtype], layout.trainer_parallel
    tensor = max(1, split // trainer.context_parallel)
    gathered = 0.0
    if layout.trainer_gpus > 1:
        # Each with its gradient: weights and gradients of a layer exist whole at the same time in the backward pass.
        around = shape.vocab * shape.hidden * (1 if shape.tied else 2)
        gathered = 2 * 2 * shape.layer_parameters * bytes_each / tensor + around * (bytes_each + BYTES["float32"])
    return TrainerMemory(
        state=state_bytes(settings, shape) / layout.trainer_gpus,
        gathered=gathered,
        activations=trainer.token_budget * activation_bytes(settings, shape, tensor) * tensor / split,
        logits=min(trainer.logprob_chunk, trainer.token_budget / split) * shape.vocab * LOGIT_BYTES,
        engine=shape.weight_bytes(settings.rollout.dtype) / layout.tensor_parallel if layout.colocated else 0.0,
        reserved=_reserved(hardware),
        available=hardware.memory * settings.simulate.costs.memory_share,
    )


def state_bytes(settings: Settings, shape: ModelShape) -> float:
    """Of weights, gradients and optimiser, over all devices: the policy's, a critic's, a frozen reference's. Where
    adapters learn (as many as there can be are counted), the policy's own weights are there once, and are the
    reference's too."""
    trainer, algorithm = settings.trainer, settings.algorithm
    weights = BYTES[trainer.dtype] if trainer.dtype != "float32" else 0  # in fp32 the masters are the weights
    learning = MASTER_BYTES + weights
    critics = 1 if algorithm.baseline == "critic" and settings.critic.backbone == "own" else 0
    frozen = BYTES[trainer.dtype] if algorithm.kl_coefficient > 0 else 0
    if settings.lora.rank:
        adapters = shape.adapter_parameters(settings.lora.rank) * learning
        base = BYTES[trainer.dtype] + (frozen if algorithm.reference is not None else 0)
        return float(adapters + shape.parameters * (base + critics * learning))
    return float(shape.parameters * ((1 + critics) * learning + frozen))


def activation_bytes(settings: Settings, shape: ModelShape, tensor: int = 1) -> float:
    """Of one token in a micro-batch, kept for the backward pass on each of `tensor` devices that share layers.

    A layer keeps the inputs of its norms and matrices (4 hidden), queries, keys, values and attention's output, and
    gate, up and their product; attention itself keeps nothing (it is computed anew in blocks). With recomputation only
    each layer's input stays, and one layer's own while it is at work. What is between layers every device has.
    """
    width = shape.attention_width
    inside = 2 * width + 2 * shape.kv_heads * shape.head_dim + 3 * shape.intermediate
    layer = 4 * shape.hidden + inside / tensor
    again = settings.trainer.activation_checkpointing
    kept = shape.layers * shape.hidden + layer if again else shape.layers * layer
    return float(kept * BYTES[settings.trainer.dtype])


def _beside_engine(settings: Settings, hardware: Hardware, shape: ModelShape, layout: Layout) -> float:
    trainer = trainer_memory(settings, hardware, shape, layout)
    kept = settings.control.max_staleness > 0 and settings.rollout.interrupt == "keep"
    return trainer.total - trainer.reserved - trainer.engine if kept else trainer.state


def _reserved(hardware: Hardware) -> float:
    return min(RESERVED, 0.05 * hardware.memory)
