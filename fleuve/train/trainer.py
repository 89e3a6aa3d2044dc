"""One training step: a batch of groups in, a new policy version out (design, sections 4.3 and 4.4)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fleuve.algorithms.advantages import group_relative
from fleuve.algorithms.losses import LossSums, policy_loss
from fleuve.config.settings import Settings
from fleuve.modeling.loading import DTYPES, load_model, pick_device, resolve_model
from fleuve.train import checkpoint
from fleuve.train.metrics import StartOfStep, batch_metrics, learnt_tokens
from fleuve.train.microbatch import Minibatch, make_micro_batches, sample_of
from fleuve.train.optimizer import MasterOptimizer
from fleuve.train.policy import Policy
from fleuve.types import Batch, StepResult, WeightFile
from fleuve.weights.store import WeightStore

Advantages = list[list[float | None]]
"""`[groups, samples]`, None where an answer has no reward."""


class Trainer:
    """Holds the weights and the optimiser's state. Single-threaded and blocking; `server.py` puts it behind HTTP.

    The same state and the same batch give the same new weights, bit for bit: nothing here is random.
    """

    def __init__(self, settings: Settings, store: WeightStore) -> None:
        self.settings = settings
        self.store = store
        self.version = 0
        self.interrupted = threading.Event()
        """Set from another thread: ends the step in progress after its current micro-batch. The caller clears it."""
        trainer = settings.trainer
        self.device = pick_device(trainer.device)
        self.source = resolve_model(settings.model.path)
        self.model = load_model(settings.model.path, torch.float32, self.device)
        self.optimizer = MasterOptimizer(
            self.model,
            DTYPES[trainer.dtype],
            betas=(trainer.beta1, trainer.beta2),
            eps=trainer.eps,
            weight_decay=trainer.weight_decay,
        )
        self.policy = Policy(
            self.model, settings.rollout.temperature, trainer.logprob_chunk, trainer.activation_checkpointing
        )

    def step(self, batch: Batch) -> StepResult:
        """Make version `batch.version + 1`.

        A minibatch in which nothing can be learnt (all advantages zero, or all tokens masked) gives no update: AdamW
        would move the weights by its momentum alone. A loss or gradient that is NaN or infinite gives none either. Both
        are counted, and the version advances all the same: the batch was consumed.

        An interrupted step keeps the minibatches that it finished; if there are none, no version is made.

        Raises:
            ValueError: the batch is for another version than the one held, a sequence is over the token budget, or
                a reward is not finite.
        """
        if batch.version != self.version:
            raise ValueError(f"the batch is for version {batch.version}, the trainer holds version {self.version}")
        advantages = self._advantages(batch)
        minibatches = self._minibatches(batch, advantages)
        start = StartOfStep(self.version)

        before = time.perf_counter()
        proximal = self._proximal([m for m in minibatches if m.micro_batches], start)
        between = time.perf_counter()
        done, metrics = self._update(minibatches, proximal, start)
        after = time.perf_counter()

        trained = [group for m in minibatches[:done] for group in m.groups]
        self.version += bool(trained)
        metrics |= batch_metrics(Batch(version=batch.version, groups=trained), self.settings.control.max_staleness)
        metrics |= start.metrics()
        metrics["time/proximal"] = between - before
        metrics["time/update"] = after - between
        return StepResult(
            version=self.version, metrics=metrics, advantages=advantages, trained=[group.id for group in trained]
        )

    def publish(self, served: int | None = None) -> WeightFile:
        """Write the current version where rollout workers read it, in their dtype, by `named_parameters` names.
        See `WeightStore.publish` for `served`."""
        dtype = DTYPES[self.settings.rollout.dtype]
        weights = ((name, master.detach().to(dtype)) for name, master in self.optimizer.masters.items())
        return self.store.publish(self.version, weights, served)

    def save(self, path: Path) -> None:
        """Write a checkpoint directory; see `checkpoint.save`."""
        checkpoint.save(path, self.model, self.optimizer, self.version, self.source)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint directory: the following steps are those that would have followed its `save`."""
        self.version = checkpoint.load(path, self.optimizer)

    def _advantages(self, batch: Batch) -> Advantages:
        normalise = self.settings.algorithm.normalise == "group"
        return [group_relative([t.reward for t in group.trajectories], normalise) for group in batch.groups]

    def _minibatches(self, batch: Batch, advantages: Advantages) -> list[Minibatch]:
        """The batch split by groups, in the order given.

        Answers with zero advantage have no gradient and do not go through the model, but their tokens count in the
        loss's denominator as everybody's do.
        """
        control, trainer = self.settings.control, self.settings.trainer
        oldest = batch.version - control.max_staleness if control.overdue == "mask" else None
        minibatches = []
        for part in split_evenly(len(batch.groups), trainer.minibatches):
            samples, loss_tokens = [], 0
            for group, group_advantages in zip(batch.groups[part], advantages[part], strict=True):
                for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True):
                    if advantage is None:
                        continue
                    learnt = learnt_tokens(trajectory, oldest)
                    loss_tokens += int(learnt.sum())
                    if advantage != 0.0:
                        samples.append(sample_of(trajectory, advantage, learnt))
            micro_batches = make_micro_batches(samples, trainer.token_budget, self.device)
            minibatches.append(Minibatch(batch.groups[part], micro_batches, loss_tokens))
        return minibatches

    def _proximal(self, minibatches: list[Minibatch], start: StartOfStep) -> list[list[Tensor | None]]:
        """What the clip is centred on: log-probabilities `[targets]` of every micro-batch of every minibatch.

        None stands for "the current policy's own, detached": until the first update the current policy *is* the
        proximal one, so the first minibatch's forward pass gives both.
        """
        if self.settings.algorithm.proximal == "behaviour":
            return [[m.behaviour for m in minibatch.micro_batches] for minibatch in minibatches]
        proximal: list[list[Tensor | None]] = [[None] * len(m.micro_batches) for m in minibatches[:1]]
        with torch.no_grad():
            for minibatch in minibatches[1:]:
                values: list[Tensor | None] = []
                for m in minibatch.micro_batches:
                    if self.interrupted.is_set():
                        return proximal
                    logprobs, entropies = self.policy.logprobs(m, entropy=True)
                    start.add(m, logprobs, entropies)
                    values.append(logprobs)
                proximal.append(values)
        return proximal

    def _update(
        self, minibatches: list[Minibatch], proximal: list[list[Tensor | None]], start: StartOfStep
    ) -> tuple[int, dict[str, float]]:
        """One optimiser update a minibatch; returns how many minibatches were done, and the metrics of the updates."""
        learning_rate = self._learning_rate()
        centres = iter(proximal)
        done, skipped, nonfinite = 0, 0, 0
        losses: list[float] = []
        norms: list[float] = []
        sums: LossSums | None = None
        for minibatch in minibatches:
            if self.interrupted.is_set():
                break
            if not minibatch.micro_batches:
                skipped += 1
                done += 1
                continue
            first = not losses and not nonfinite
            accumulated = self._accumulate(minibatch, next(centres), start if first else None)
            if accumulated is None:
                break
            loss, minibatch_sums = accumulated
            norm, updated = self.optimizer.step(learning_rate, self.settings.trainer.max_grad_norm, math.isfinite(loss))
            done += 1
            if updated:
                losses.append(loss)
                norms.append(norm)
                sums = minibatch_sums if sums is None else sums + minibatch_sums
            else:
                nonfinite += 1
        metrics = {
            "loss/learning_rate": learning_rate,
            "loss/skipped_minibatches": float(skipped),
            "loss/skipped_nonfinite": float(nonfinite),
        }
        if sums is None and skipped and not nonfinite:  # nothing to learn: that is a loss and a gradient of zero
            metrics |= {"loss/policy": 0.0, "loss/grad_norm": 0.0}
        if sums is not None:
            metrics["loss/policy"] = sum(losses) / len(losses)
            metrics["loss/grad_norm"] = sum(norms) / len(norms)
            metrics |= sums.metrics()
        return done, metrics

    def _accumulate(
        self, minibatch: Minibatch, proximal: list[Tensor | None], start: StartOfStep | None
    ) -> tuple[float, LossSums] | None:
        """Add up the gradient of one minibatch; returns its loss and sums, or None if interrupted (and forgets it).

        `start` is given while the weights are still those of the start of the step.
        """
        algorithm = self.settings.algorithm
        total, sums = 0.0, None
        for m, centre in zip(minibatch.micro_batches, proximal, strict=True):
            if self.interrupted.is_set():
                self.optimizer.zero_grad()
                return None
            logprobs, entropies = self.policy.logprobs(m, entropy=start is not None)
            if start is not None:
                start.add(m, logprobs, entropies)
            loss, part = policy_loss(
                logprobs,
                logprobs if centre is None else centre,
                m.behaviour,
                m.advantages,
                torch.ones_like(m.advantages, dtype=torch.bool),
                denominator=minibatch.loss_tokens,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                cap=algorithm.cap,
                cap_value=algorithm.cap_value,
            )
            loss.backward()
            total += float(loss.detach())
            sums = part if sums is None else sums + part
        assert sums is not None  # a minibatch without micro-batches does not come here
        return total, sums

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
