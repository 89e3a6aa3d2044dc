"""What the trainer takes for a step: arithmetic at a utilisation, the wires, and waiting for the slowest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleuve.config.settings import Settings
from fleuve.config.simulation import CostSettings, MeasuredSettings
from fleuve.simulate.engine_costs import model_shape_of
from fleuve.simulate.hardware import Hardware, load_hardware
from fleuve.simulate.layout import Layout, layout_of
from fleuve.simulate.model_shape import BYTES, ModelShape
from fleuve.train.sharing import SequenceCost, share_out

BACKWARD = 2.0
"""Arithmetic of the backward pass of a matrix product, in forward passes: one product for each of its two inputs."""

ATTENTION_BACKWARD = 2.5
"""The same for attention: five products where the forward pass has two, since the scores are computed anew."""

OPTIMISER_BYTES = 40
"""Read and written of one parameter by clipping and AdamW in fp32: the gradient three times and zeroed, master and two
moments read and written."""


@dataclass(frozen=True)
class TrainerCosts:
    """All training devices together. Times are seconds."""

    hardware: Hardware
    shape: ModelShape
    dtype: str
    publish_dtype: str
    layout: Layout
    token_budget: int
    recompute_activations: bool
    forward_passes: int
    proximal: bool
    proximal_first: bool
    critic: bool
    costs: CostSettings
    measured: MeasuredSettings

    @classmethod
    def of(cls, settings: Settings) -> TrainerCosts:
        """The trainer that the settings describe.

        Raises:
            UserError: unknown hardware or model, devices that cannot share it, or a layout that cannot be.
        """
        trainer, algorithm = settings.trainer, settings.algorithm
        shape = model_shape_of(settings)
        shape.check_split(layout_of(settings).trainer_parallel, "simulate.trainer_parallel")
        own_critic = algorithm.baseline == "critic" and settings.critic.backbone == "own"
        return cls(
            hardware=load_hardware(settings.simulate.hardware),
            shape=shape,
            dtype=trainer.dtype,
            publish_dtype=settings.rollout.dtype,
            layout=layout_of(settings),
            token_budget=trainer.token_budget,
            recompute_activations=trainer.activation_checkpointing,
            forward_passes=int(algorithm.kl_coefficient > 0) + int(own_critic),
            proximal=algorithm.proximal == "recompute",
            proximal_first=algorithm.cap == "second_moment",
            critic=own_critic,
            costs=settings.simulate.costs,
            measured=settings.simulate.measured,
        )

    def step_seconds(self, minibatches: Sequence[Sequence[int]]) -> float:
        """One step: for each minibatch the lengths, in tokens, of the sequences that are learnt from. Colocated, the
        devices change over from generating first.

        The proximal pass is one forward pass of every minibatch but the first that learns (whose own gives it), as in
        `train.anchors`; a reference and a critic each add one of all.

        Raises:
            ValueError: a sequence is over the token budget.
        """
        total = self._around_step
        first = True
        for lengths in minibatches:
            if not len(lengths):
                continue
            forwards = self.forward_passes + int(self.proximal and (not first or self.proximal_first))
            for ranks in self.rounds(lengths):
                total += self._slowest(ranks, backward=True) * (2 if self.critic else 1)
                total += forwards * self._slowest(ranks, backward=False)
            total += self.update_seconds()
            first = False
        return total

    def rounds(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """A minibatch as the trainer shares it out: `[micro-batches][ranks]`, the lengths of what each computes at the
        same time; empty where a rank has nothing left.

        Raises:
            ValueError: a sequence is over the token budget.
        """
        shape = self.shape
        cost = SequenceCost.of(shape.active_parameters, shape.layers, shape.attention_width)
        shares = share_out(lengths, self.layout.ranks, self.token_budget, cost)
        return [[[lengths[i] for i in bin_] for bin_ in together] for together in zip(*shares, strict=True)]

    def least_seconds(self, minibatches: Sequence[Sequence[int]]) -> float:
        """A bound below `step_seconds` that needs no packing: work as even as if sequences could be cut in pieces."""
        total = self._around_step
        first = True
        for lengths in minibatches:
            if not len(lengths):
                continue
            count = -(-sum(lengths) // (self.layout.ranks * self.token_budget))
            forwards = self.forward_passes + int(self.proximal and (not first or self.proximal_first))
            for backward, passes in ((True, 2 if self.critic else 1), (False, forwards)):
                work = self._arithmetic(lengths, backward) / self.layout.ranks
                wires = count * self._gathering(backward)
                total += passes * (max(work, wires) + count * self._micro_batch_overhead)
            total += self.update_seconds()
            first = False
        return total

    def micro_batch_seconds(self, lengths: Sequence[int], backward: bool) -> float:
        """One rank's micro-batch: arithmetic, or the gathering of the weights meanwhile where that takes longer."""
        return max(self._arithmetic(lengths, backward), self._gathering(backward)) + self._micro_batch_overhead

    def flops(self, lengths: Sequence[int], backward: bool) -> float:
        """Operations of a micro-batch, those of recomputed activations included."""
        tokens, pairs = float(sum(lengths)), sum(n * n / 2 for n in lengths)
        linear, attention = self.shape.forward_flops(tokens, 0), self.shape.forward_flops(0, pairs)
        if not backward:
            return linear + attention
        again = 1 if self.recompute_activations else 0
        return linear * (1 + BACKWARD + again) + attention * (1 + ATTENTION_BACKWARD + again)

    def update_seconds(self) -> float:
        """One update by the optimiser: it is bound by memory, each device holds its share."""
        if self.measured.train_per_token is not None:
            return 0.0  # then in what was measured
        share = self.shape.parameters * OPTIMISER_BYTES / self.layout.trainer_gpus
        return share / (self.hardware.memory_bandwidth * self.costs.bandwidth_share)

    def publish_seconds(self) -> float:
        """Bringing one version of the weights to where engines fetch them: gathered over the trainer, sent on once.
        Colocated, the devices change back to generating then."""
        if self.measured.publish is not None:
            return self.measured.publish
        size = self.shape.weight_bytes(self.publish_dtype)
        nodes = -(-self.layout.trainer_gpus // self.hardware.node)
        adapters = min(self.layout.trainer_gpus, self.hardware.node) * nodes
        sending = size / (adapters * self.hardware.network * self.costs.network_share)
        return self.costs.publish_overhead + self._gather(size) + sending + self._switch

    def _slowest(self, ranks: Sequence[Sequence[int]], backward: bool) -> float:
        """One micro-batch on every rank: they gather the same layers at the same time, so they wait for each other."""
        busy = [lengths for lengths in ranks if lengths]
        idle = [()] if len(busy) < len(ranks) else []  # dummies, all alike: of many ranks most may have nothing
        return max(self.micro_batch_seconds(lengths, backward) for lengths in (*busy, *idle))

    def _arithmetic(self, lengths: Sequence[int], backward: bool) -> float:
        measured = self.measured
        tokens = sum(lengths)
        if measured.train_per_token is not None:
            forward = measured.train_per_token / 3 if measured.forward_per_token is None else measured.forward_per_token
            return tokens * (measured.train_per_token if backward else forward)
        devices = self.layout.trainer_parallel
        work = self.flops(lengths, backward) / devices
        return work / (self.hardware.peak[self.dtype] * self.utilisation) + self._splitting(tokens, backward)

    def _splitting(self, tokens: int, backward: bool) -> float:
        """Tensor parallelism: two all-reduces a layer of the hidden states, in every forward and backward pass."""
        devices = self.layout.trainer_parallel
        if devices == 1:
            return 0.0
        passes = (2 + self.recompute_activations) if backward else 1
        payload = 2 * self.shape.layers * tokens * self.shape.hidden * BYTES[self.dtype]
        rate = self.hardware.fabric(devices) * self.costs.network_share
        return passes * 2 * (devices - 1) / devices * payload / rate

    def _gathering(self, backward: bool) -> float:
        """Sharded weights: gathered for the forward pass and again for the backward pass, whose gradients are then
        reduced and scattered. Fetching ahead hides it behind arithmetic."""
        if self.measured.train_per_token is not None:
            return 0.0
        return (3 if backward else 1) * self._gather(self.shape.weight_bytes(self.dtype))

    def _gather(self, size: float) -> float:
        """Every rank comes to hold `size` bytes of which each held a share; within a rank's own devices it is split."""
        ranks = self.layout.ranks
        if ranks == 1:
            return 0.0
        share = size / self.layout.trainer_parallel * (ranks - 1) / ranks
        return share / (self.hardware.fabric(self.layout.trainer_gpus) * self.costs.network_share)

    @property
    def utilisation(self) -> float:
        """Of the peak arithmetic: products of narrow matrices reach less of it."""
        return self.costs.train_flops_share * self.shape.hidden / (self.shape.hidden + self.costs.train_half_width)

    @property
    def _around_step(self) -> float:
        """What a step takes besides its minibatches."""
        return self.costs.step_overhead + self._switch if self.measured.step is None else self.measured.step

    @property
    def _switch(self) -> float:
        return self.costs.switch_seconds if self.layout.colocated else 0.0

    @property
    def _micro_batch_overhead(self) -> float:
        measured = self.measured.train_per_micro_batch
        return self.costs.micro_batch_overhead if measured is None else measured
