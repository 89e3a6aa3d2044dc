"""One training step: a batch of groups in, a new policy version out (design, sections 4.3 and 4.4)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fleuve.algorithms.aggregation import Totals
from fleuve.algorithms.kl import ESTIMATORS
from fleuve.algorithms.losses import LossInputs
from fleuve.config.settings import Settings
from fleuve.modeling.loading import DTYPES, pick_device, resolve_model
from fleuve.train import checkpoint, sharded_checkpoint
from fleuve.train.anchors import Anchors, find_anchors, proximal_of
from fleuve.train.credit import Credits, PerToken, assign_credit, with_credit
from fleuve.train.metrics import StartOfStep, batch_metrics, credit_metrics, learnt_tokens
from fleuve.train.microbatch import MicroBatch, Minibatch, Sample, evaluate_samples, make_micro_batches, sample_of
from fleuve.train.parts import open_critic, open_policy, open_reference, policy_loss_of
from fleuve.train.ranks import Ranks
from fleuve.train.record import Accumulated, UpdateRecord
from fleuve.train.sharded_optimizer import ShardedOptimizer
from fleuve.types import Batch, BoolArray, StepResult, Trajectory, WeightFile
from fleuve.weights.store import WeightStore


class _InterruptedError(Exception):
    """The step is to end, and has not come to its first update."""


class Trainer:
    """Holds the weights and the optimiser's state. Single-threaded and blocking; `server.py` puts it behind HTTP.

    The same state and the same batch give the same new weights, bit for bit: nothing here is random.

    One of several `ranks` has the whole batch and its own micro-batches of it. All call the same methods with the same
    arguments, and take the same decisions in them; only rank 0 has a `store`.
    """

    def __init__(self, settings: Settings, store: WeightStore | None, ranks: Ranks | None = None) -> None:
        self.settings = settings
        self.store = store
        self.ranks = ranks or Ranks()
        self.version = 0
        self.interrupted = threading.Event()
        """Set from another thread: ends the step in progress after its current micro-batch. The caller clears it."""
        self.device = pick_device(settings.trainer.device)
        self.source = resolve_model(settings.model.path)
        self.policy, self.optimizer, self.pack = open_policy(settings, self.device, self.ranks)
        self.model = self.policy.model
        self.loss = policy_loss_of(settings)
        self.reference = open_reference(settings, self.device, self.ranks, self.policy)
        self.critic = open_critic(settings, self.policy)
        self._nonfinite_in_a_row = 0

    def step(self, batch: Batch) -> StepResult:
        """Make version `batch.version + 1`.

        A minibatch in which nothing can be learnt (all advantages zero and no regulariser, all tokens masked, or a
        gradient of zero for whatever reason) gives no update: AdamW would move the weights by its momentum alone. A
        loss or gradient that is NaN or infinite gives none either: weights and moments stay as they are, bit for bit.
        Both are counted, and the version advances all the same: the batch was consumed.

        An interrupted step keeps the minibatches that it finished; if there are none, no version is made.

        Raises:
            ValueError: the batch is for another version than the one held, or a sequence is over the token budget.
        """
        if batch.version != self.version:
            raise ValueError(f"the batch is for version {batch.version}, the trainer holds version {self.version}")
        began = time.perf_counter()
        try:
            credits = self._credits(batch)
        except _InterruptedError:
            nothing: list[list[float | None]] = [[None for _ in group.trajectories] for group in batch.groups]
            return StepResult(version=self.version, metrics={}, advantages=nothing, trained=[])
        minibatches = self._minibatches(batch, credits)
        start = StartOfStep(self.version)

        before = time.perf_counter()
        anchors = find_anchors(
            minibatches, self.settings.algorithm, self.policy, self.reference, start, self._stopped, self.ranks
        )
        between = time.perf_counter()
        done, metrics = self._update(minibatches, anchors, start)
        after = time.perf_counter()

        trained = [group for m in minibatches[:done] for group in m.groups]
        self.version += bool(trained)
        metrics |= batch_metrics(Batch(version=batch.version, groups=trained), self.settings.control.max_staleness)
        metrics |= credit_metrics(credits) | start.metrics(self.ranks)
        metrics |= {"time/credit": before - began, "time/proximal": between - before, "time/update": after - between}
        advantages = [[None if credit is None else credit.mean for credit in row] for row in credits]
        return StepResult(
            version=self.version, metrics=metrics, advantages=advantages, trained=[group.id for group in trained]
        )

    def publish(self, served: int | None = None) -> WeightFile | None:
        """Write the current version where rollout workers read it, in their dtype, by `named_parameters` names.
        See `WeightStore.publish` for `served`. None on a rank that only hands its share of the weights in."""
        weights = self.optimizer.weights(DTYPES[self.settings.rollout.dtype])
        try:
            return None if self.store is None else self.store.publish(self.version, weights, served)
        finally:
            for _ in weights:  # all ranks hand theirs in, also when the disk is full half-way
                pass

    def save(self, path: Path) -> None:
        """Write a checkpoint directory; see `checkpoint.save`."""
        if isinstance(self.optimizer, ShardedOptimizer):
            sharded_checkpoint.save(path, self.optimizer, self.version, self.source)
        else:
            checkpoint.save(path, self.model, self.optimizer, self.version, self.source, self.critic)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint directory: the following steps are those that would have followed its `save`, on
        however many ranks that was made."""
        self.version = checkpoint.load(path, self.optimizer, self.critic, self.ranks)

    def _stopped(self) -> bool:
        """Whether any rank has been told to end the step."""
        return self.ranks.any(self.interrupted.is_set())

    def _credits(self, batch: Batch) -> Credits:
        """The advantage of every token that may be learnt."""
        algorithm = self.settings.algorithm
        kl = values = None
        if self.reference is not None and algorithm.kl_in == "reward":
            reference, estimate = self.reference, ESTIMATORS[algorithm.kl_estimator]
            kl = self._evaluate(batch, lambda m: estimate(m.behaviour, reference.logprobs(m)[0]))
        if self.critic is not None:
            values = self._evaluate(batch, self.critic.values)
        limit = self.settings.rollout.max_new_tokens
        return assign_credit(batch.groups, algorithm, limit, self._learnt(batch), kl, values)

    def _learnt(self, batch: Batch) -> Callable[[Trajectory], BoolArray]:
        control = self.settings.control
        oldest = batch.version - control.max_staleness if control.overdue == "mask" else None
        return lambda trajectory: learnt_tokens(trajectory, oldest)

    @torch.no_grad()
    def _evaluate(self, batch: Batch, compute: Callable[[MicroBatch], Tensor]) -> PerToken:
        """`compute`'s `[targets]` on every sampled token of every answer of the batch."""

        def computed(m: MicroBatch) -> Tensor:
            if self._stopped():
                raise _InterruptedError
            return compute(m)

        places = [(g, i) for g, group in enumerate(batch.groups) for i in range(len(group.trajectories))]
        answers = [batch.groups[g].trajectories[i] for g, i in places]
        samples = [sample_of(t, t.loss_mask) for t in answers]
        micro_batches = self._micro_batches(samples)
        evaluated = evaluate_samples(samples, micro_batches, computed)
        evaluated = self.ranks.fill_in(evaluated, [len(s.targets) for s in samples])
        found = dict(zip(places, evaluated, strict=True))
        return lambda g, i: found[g, i]

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Those of this rank; every rank has as many."""
        return make_micro_batches(samples, self.settings.trainer.token_budget, self.device, self.pack)

    def _minibatches(self, batch: Batch, credits: Credits) -> list[Minibatch]:
        """The batch split by groups, in the order given.

        Answers that have no gradient, since their advantages are zero and nothing else is learnt from them, do not go
        through the model; but their tokens count in the loss's totals as everybody's do.
        """
        minibatches = []
        for part in split_evenly(len(batch.groups), self.settings.trainer.minibatches):
            samples, totals = self._samples(batch, credits, part)
            micro_batches = self._micro_batches(list(samples.values()))
            minibatches.append(Minibatch(batch.groups[part], micro_batches, totals))
        return minibatches

    def _samples(self, batch: Batch, credits: Credits, part: slice) -> tuple[dict[tuple[int, int], Sample], Totals]:
        """What is learnt from the groups of `part`, by (index of the group in the batch, of the answer in it), and the
        loss's totals over it."""
        learnt_of = self._learnt(batch)
        everything = self.settings.algorithm.regularised or self.critic is not None
        samples: dict[tuple[int, int], Sample] = {}
        tokens = answers = 0
        for g in range(len(batch.groups))[part]:
            for i, (trajectory, credit) in enumerate(zip(batch.groups[g].trajectories, credits[g], strict=True)):
                if credit is None:
                    continue
                learnt = learnt_of(trajectory)
                tokens += int(learnt.sum())
                answers += bool(learnt.any())
                if everything or bool(credit.advantages.any()):
                    samples[g, i] = with_credit(sample_of(trajectory, learnt), credit)
        return samples, Totals(tokens, answers)

    def _update(
        self, minibatches: list[Minibatch], anchors: list[Anchors], start: StartOfStep
    ) -> tuple[int, dict[str, float]]:
        """One optimiser update a minibatch; returns how many minibatches were done, and the metrics of the updates."""
        learning_rate = self._learning_rate()
        record = UpdateRecord(learning_rate, in_a_row=self._nonfinite_in_a_row)
        for minibatch, anchor in zip(minibatches, anchors, strict=False):
            if self._stopped():
                break
            if not minibatch.micro_batches:
                record.skip()
                continue
            untouched = record.updates == 0 and all(p is None for p in anchor.proximal)
            progress = record.made / len(minibatches)
            accumulated = self._accumulate(minibatch, anchor, progress, start if untouched else None)
            if accumulated is None:
                break
            record.add(accumulated, *self._apply(accumulated, learning_rate))
        self._nonfinite_in_a_row = record.in_a_row
        return record.done, record.metrics()

    def _accumulate(
        self,
        minibatch: Minibatch,
        anchor: Anchors,
        progress: float,
        start: StartOfStep | None,
        watch: Callable[[LossInputs], None] | None = None,
    ) -> Accumulated | None:
        """Add up the gradients of one minibatch over all ranks, or forget them and return None if interrupted.

        `start` is given while the weights are still those of the start of the step, and nobody has told it of them.
        `watch` sees what each micro-batch's loss is made of.
        """
        algorithm = self.settings.algorithm
        accumulated = Accumulated()
        parts = zip(minibatch.micro_batches, anchor.proximal, anchor.reference, strict=True)
        for m, recomputed, reference in parts:
            if self._stopped():
                self.optimizer.zero_grad()
                if self.critic is not None:
                    self.critic.zero_grad()
                return None
            with torch.set_grad_enabled(not self._only_critic):
                bonus = self.loss.entropy_coefficient != 0
                output = self.policy.outputs(m, entropy=bonus or start is not None)
                if m.dummy:
                    (output.logprobs.sum() * 0.0).backward()
                    continue
                if start is not None:
                    start.add(m, output.logprobs, output.entropies)
                inputs = LossInputs(
                    logprobs=output.logprobs,
                    proximal=proximal_of(m, recomputed, output.logprobs, algorithm, self.version, progress),
                    behaviour=m.behaviour,
                    advantages=m.advantages,
                    staleness=self.version - m.versions,
                    answers=m.answers,
                    reference=reference,
                    entropies=output.entropies if bonus else None,
                )
                if watch is not None:
                    watch(inputs)
                loss, sums = self.loss(inputs, minibatch.totals, anchor.weight_limit)
            accumulated.add_policy(loss, sums)
            if self.critic is not None:
                values = self.critic.values(m, output.hidden if self.critic.shared else None)
                everywhere = torch.ones_like(m.returns, dtype=torch.bool)
                value_loss, value_sums = self.critic.loss(
                    values, m.values, m.returns, everywhere, denominator=minibatch.totals.tokens
                )
                accumulated.add_critic(value_loss, value_sums)
                loss = value_loss if self._only_critic else loss + value_loss
            loss.backward()
        return accumulated.over(self.ranks)

    def _apply(self, accumulated: Accumulated, learning_rate: float) -> tuple[float | None, float | None]:
        """One update of the policy and one of the critic. Returns the norms of their gradients: None where there was no
        update to make, NaN where it was refused, 0 where there was nothing to learn."""
        limit = self.settings.trainer.max_grad_norm
        usable = accumulated.finite
        if self.critic is not None and not self._only_critic:  # neither learns from what the other must not
            usable = usable and math.isfinite(self.optimizer.norm()) and math.isfinite(self.critic.norm())
        norm = critic_norm = None
        if self._only_critic:
            self.optimizer.zero_grad()
        else:
            norm, updated = self.optimizer.step(learning_rate, limit, usable)
            norm = norm if updated or (usable and norm == 0) else math.nan
        if self.critic is not None:
            critic_norm, updated = self.critic.step(usable)
            critic_norm = critic_norm if updated or (usable and critic_norm == 0) else math.nan
        return norm, critic_norm

    @property
    def _only_critic(self) -> bool:
        """Whether this step leaves the policy as it is, while the critic learns what it is worth."""
        return self.critic is not None and self.critic.warming_up(self.version)

    def _learning_rate(self) -> float:
        trainer = self.settings.trainer
        warmed = min(1.0, (self.version + 1) / trainer.warmup_steps) if trainer.warmup_steps else 1.0
        return trainer.learning_rate * warmed


def split_evenly(count: int, parts: int) -> Iterator[slice]:
    """`count` things in order into `parts` slices whose sizes differ by one at most (some are empty if count < parts).

    Example: 5 in 2 parts are [0:3] and [3:5].
    """
    small, larger = divmod(count, parts)
    first = 0
    for part in range(parts):
        last = first + small + (part < larger)
        yield slice(first, last)
        first = last
