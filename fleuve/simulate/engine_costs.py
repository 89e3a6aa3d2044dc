"""What one rollout engine takes for its work: a roofline of memory bandwidth and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from fleuve.config.settings import Settings
from fleuve.config.simulation import CostSettings, MeasuredSettings
from fleuve.errors import UserError
from fleuve.simulate.hardware import Hardware, load_hardware
from fleuve.simulate.layout import layout_of
from fleuve.simulate.memory import engine_memory, max_running
from fleuve.simulate.model_shape import BYTES, ModelShape, load_model_shape


@dataclass(frozen=True)
class EngineCosts:
    """One engine on `devices` (tensor parallel). Times are seconds, sizes tokens."""

    hardware: Hardware
    shape: ModelShape
    dtype: str
    devices: int
    costs: CostSettings
    measured: MeasuredSettings
    kv_capacity_tokens: int
    max_running: int
    prefill_tokens: int

    @classmethod
    def of(cls, settings: Settings) -> EngineCosts:
        """The engine that the settings describe.

        Raises:
            UserError: unknown hardware or model, devices that cannot share it, or an engine's memory without room for
                one longest answer.
        """
        simulate, rollout = settings.simulate, settings.rollout
        hardware, shape = load_hardware(simulate.hardware), model_shape_of(settings)
        layout = layout_of(settings)
        shape.check_split(layout.tensor_parallel, "simulate.tensor_parallel")
        if simulate.gpus is not None:
            memory = engine_memory(settings, hardware, shape, layout)
            capacity = simulate.kv_cache_tokens or memory.kv_tokens
        else:
            capacity = simulate.kv_cache_tokens or rollout.kv_cache_tokens
        longest = simulate.prompt_tokens + rollout.max_new_tokens
        if capacity < longest:
            raise UserError(
                f"an engine on {layout.tensor_parallel} × {hardware.name} has room for {max(capacity, 0):,} tokens "
                f"of KV cache beside the weights of {shape.name}, the longest sequence is {longest:,} tokens"
            )
        return cls(
            hardware=hardware,
            shape=shape,
            dtype=rollout.dtype,
            devices=layout.tensor_parallel,
            costs=simulate.costs,
            measured=simulate.measured,
            kv_capacity_tokens=capacity,
            max_running=max_running(settings),
            prefill_tokens=rollout.prefill_tokens,
        )

    def decode(self, sequences: int) -> tuple[float, float]:
        """One decode step of `sequences`: `(base, per_kv)`, so that it takes `base + per_kv · K` seconds with K tokens
        in all their caches.

        Base: the weights are read once whatever the batch, or the arithmetic takes longer; two all-reduces a layer; the
        step's and the sequences' overheads. Each cached token is read once and costs four operations a unit of
        attention's width and layer; keys that are fewer than the devices are held, and read, more than once.
        """
        costs, measured = self.costs, self.measured
        bandwidth, flops = self._bandwidth, self._peak * costs.decode_flops_share
        weights = self.shape.active_parameters * BYTES[self.dtype] / self.devices / bandwidth
        arithmetic = 2 * self.shape.active_parameters * sequences / self.devices / flops
        base = costs.decode_overhead + max(weights, arithmetic) + self._allreduce(sequences)
        each = costs.sequence_overhead
        kv = self.shape.kv_bytes(self.dtype) / min(self.devices, self.shape.kv_heads) / bandwidth
        score = 4 * self.shape.layers * self.shape.attention_width / self.devices / flops
        per_kv = max(kv, score)
        if measured.decode_base is not None:
            base, each = measured.decode_base, 0.0
        if measured.decode_per_sequence is not None:
            each = measured.decode_per_sequence
        if measured.decode_per_kv_token is not None:
            per_kv = measured.decode_per_kv_token
        return base + each * sequences, per_kv

    def prefill_seconds(self, tokens: int, pairs: float = 0.0, answers: int = 0) -> float:
        """Computing `tokens` new entries of the KV cache (of a prompt, or again after new weights or a preemption).

        Args:
            pairs: of queries and the keys they see, over all sequences: L²/2 for each that is computed from nothing.
            answers: that are new to the engine.
        """
        requests = (self.measured.per_answer or 0.0) * answers
        if tokens <= 0:
            return requests
        if self.measured.prefill_per_token is not None:
            return requests + (self.measured.prefill_base or 0.0) + self.measured.prefill_per_token * tokens
        chunks = -(-tokens // self.prefill_tokens)
        flops = self._peak * self.costs.prefill_flops_share
        arithmetic = self.shape.forward_flops(tokens, pairs) / self.devices / flops
        weights = chunks * self.shape.active_parameters * BYTES[self.dtype] / self.devices / self._bandwidth
        latency = chunks * (self.costs.decode_overhead + self._allreduce(0))
        return requests + latency + max(arithmetic, weights) + self._allreduce_traffic(tokens)

    def update_seconds(self) -> float:
        """Loading one version of the weights: each device takes its share over the network, all at the same time."""
        if self.measured.update is not None:
            return self.measured.update
        share = self.shape.weight_bytes(self.dtype) / self.devices
        return self.costs.update_overhead + share / (self.hardware.network * self.costs.network_share)

    @property
    def _bandwidth(self) -> float:
        return self.hardware.memory_bandwidth * self.costs.bandwidth_share

    @property
    def _peak(self) -> float:
        return self.hardware.peak[self.dtype]

    def _allreduce(self, tokens: float) -> float:
        """Two all-reduces a layer of the hidden states of `tokens`."""
        if self.devices == 1:
            return 0.0
        return 2 * self.shape.layers * self.costs.allreduce_latency + self._allreduce_traffic(tokens)

    def _allreduce_traffic(self, tokens: float) -> float:
        if self.devices == 1:
            return 0.0
        payload = 2 * self.shape.layers * tokens * self.shape.hidden * BYTES[self.dtype]
        each = 2 * (self.devices - 1) / self.devices * payload
        return each / (self.hardware.fabric(self.devices) * self.costs.network_share)


def model_shape_of(settings: Settings) -> ModelShape:
    """`simulate.model`, or else the run's own model.

    Raises:
        UserError: see `load_model_shape`.
    """
    if settings.simulate.model is not None:
        return load_model_shape(settings.simulate.model)
    return load_model_shape(settings.model.path, "model.path")
