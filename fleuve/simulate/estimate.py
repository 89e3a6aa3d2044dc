"""What a run will take, by arithmetic alone: the first look of `fleuve plan`, before anything is simulated.

A steady state is assumed: as many answers in flight as fit, each as long as the mean; a step takes as long as the
slower of the two sides. What that leaves out (who waits for whom, and when) is what the simulation is for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fleuve.config.settings import Settings
from fleuve.simulate.engine_costs import EngineCosts
from fleuve.simulate.layout import layout_of
from fleuve.simulate.lengths import open_lengths
from fleuve.simulate.trainer_costs import TrainerCosts


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, and of each side's work in it."""

    step: float
    rollout: float
    training: float


@dataclass(frozen=True)
class Work:
    """What one minibatch's answers look like: lengths of whole sequences as the trainer gets them, and of the answers
    the mean, the mean square, and the longest."""

    sequences: tuple[int, ...]
    mean: float
    square: float
    longest: int
    answers: np.ndarray


def work_of(settings: Settings) -> Work:
    """Lengths of one minibatch, drawn from the run's own distribution.

    Raises:
        UserError: the distribution cannot be opened.
    """
    draw = open_lengths(settings).draw
    groups = max(1, settings.control.batch_size // settings.trainer.minibatches)
    answers = [draw(f"estimate/{g}", i) for g in range(groups) for i in range(settings.rollout.group_size)]
    prompt = settings.simulate.prompt_tokens
    array = np.sort(np.asarray(answers, np.float64))
    return Work(
        sequences=tuple(prompt + n for n in answers),
        mean=float(array.mean()),
        square=float((array**2).mean()),
        longest=int(array[-1]),
        answers=array,
    )


def estimate(settings: Settings, work: Work) -> Estimate:
    """The steady state of a run whose answers look like `work`.

    Raises:
        UserError: the layout cannot be, or an engine has no room for one answer.
    """
    training = _training(_trainer(settings), settings.trainer.minibatches, work.sequences)
    return _together(settings, _rollout(settings, work), training)


def bound(settings: Settings, work: Work) -> Estimate:
    """A bound below `estimate`, much faster: training as if it could be balanced perfectly."""
    costs, minibatches = _trainer(settings), settings.trainer.minibatches
    one = costs.least_seconds([work.sequences])
    further = costs.least_seconds([work.sequences, work.sequences]) - one if minibatches > 1 else 0.0
    training = one + (minibatches - 1) * further + costs.publish_seconds()
    return _together(settings, _rollout(settings, work), training)


def _together(settings: Settings, rollout: float, training: float) -> Estimate:
    in_turn = settings.launch.placement == "colocated" or settings.control.max_staleness == 0
    return Estimate(rollout + training if in_turn else max(rollout, training), rollout, training)


def _trainer(settings: Settings) -> TrainerCosts:
    """Without the engines, on which it does not depend: so that what was computed is found again."""
    costs = TrainerCosts.of(settings)
    return replace(costs, layout=replace(costs.layout, engines=1, tensor_parallel=1))


def _rollout(settings: Settings, work: Work) -> float:
    colocated = settings.launch.placement == "colocated"
    if settings.control.max_staleness == 0:
        return _at_once(settings, work)
    return _steady(settings, work, colocated)


@lru_cache(maxsize=4096)
def _training(costs: TrainerCosts, minibatches: int, sequences: tuple[int, ...]) -> float:
    """A step of equal minibatches: the first, and each further one with its proximal pass."""
    one = costs.step_seconds([sequences])
    further = costs.step_seconds([sequences, sequences]) - one if minibatches > 1 else 0.0
    return one + (minibatches - 1) * further + costs.publish_seconds()


def _steady(settings: Settings, work: Work, colocated: bool) -> float:
    """Answers of a batch at the rate at which engines end them, and what the new weights cost each engine."""
    engine, engines = EngineCosts.of(settings), layout_of(settings).engines
    control, rollout, prompt = settings.control, settings.rollout, settings.simulate.prompt_tokens
    batch = control.batch_size * rollout.group_size
    slots = (control.max_staleness + colocated) * batch  # apart from those that are being trained meanwhile
    half_way = work.square / work.mean / 2  # what a running answer has so far: long ones run for longer
    cached = prompt + half_way
    running = max(1, int(min(slots / engines, engine.max_running, engine.kv_capacity_tokens / cached)))
    base, per_kv = engine.decode(running)
    step = base + per_kv * running * cached
    decoding = batch * work.mean / (engines * running) * step
    prompts = control.batch_size / engines * engine.prefill_seconds(prompt, prompt * prompt / 2)
    update = engine.update_seconds()
    if rollout.interrupt == "recompute":
        update += engine.prefill_seconds(int(running * cached), running * cached * cached * 2 / 3)
    elif rollout.interrupt == "finish":
        update += work.longest * engine.decode(1)[0]
    # With `wait`, nothing is staler than η: the longest answer has η + 1 steps to come in.
    return max(decoding + prompts + update, work.longest * step / (control.max_staleness + 1))


def _at_once(settings: Settings, work: Work) -> float:
    """Synchronous: a whole batch starts together and the longest ends it, at a step that gets faster as others end."""
    engine, engines = EngineCosts.of(settings), layout_of(settings).engines
    prompt = settings.simulate.prompt_tokens
    each = max(1.0, settings.control.batch_size * settings.rollout.group_size / engines)
    running = min(each, engine.max_running, max(1.0, engine.kv_capacity_tokens / (prompt + work.mean)))
    lengths = np.unique(work.answers)
    alive = 1 - np.searchsorted(work.answers, lengths, side="left") / len(work.answers)
    starts = np.concatenate([[0.0], lengths[:-1]])
    total = 0.0
    for start, end, share in zip(starts, lengths, alive, strict=True):
        base, per_kv = engine.decode(max(1, round(running * share)))
        total += (end - start) * (base + per_kv * running * share * (prompt + (start + end) / 2))
    prompts = settings.control.batch_size / engines * engine.prefill_seconds(prompt, prompt * prompt / 2)
    return total * each / running + prompts + engine.update_seconds()
