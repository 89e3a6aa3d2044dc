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
    """What a batch's answers look like: minibatches of lengths of whole sequences as the trainer gets them (a large
    batch's first, for all), and of the answers the mean, the mean square, and the longest. `running` is the share of a
    group's answers that run while it does, in the mean: its slot is held until the longest is done."""

    minibatches: tuple[tuple[int, ...], ...]
    repeated: int
    mean: float
    square: float
    longest: int
    running: float
    answers: np.ndarray


MOST_SEQUENCES = 4096
"""A batch with more is judged by its first minibatch: packing takes the time of a plan's search."""


def work_of(settings: Settings) -> Work:
    """Lengths drawn from the run's own distribution.

    Raises:
        UserError: the distribution cannot be opened.
    """
    draw = open_lengths(settings).draw
    count, group_size = settings.trainer.minibatches, settings.rollout.group_size
    groups, prompt = settings.control.batch_size // count, settings.simulate.prompt_tokens
    looked_at = count if settings.control.batch_size * group_size <= MOST_SEQUENCES else 1
    drawn = [[draw(f"estimate/{m}/{g}", i) for g in range(groups) for i in range(group_size)] for m in range(looked_at)]
    answers = [length for minibatch in drawn for length in minibatch]
    array = np.sort(np.asarray(answers, np.float64))
    return Work(
        minibatches=tuple(tuple(prompt + n for n in minibatch) for minibatch in drawn),
        repeated=count // looked_at,
        mean=float(array.mean()),
        square=float((array**2).mean()),
        longest=int(array[-1]),
        running=float(array.mean() / np.asarray(answers, np.float64).reshape(-1, group_size).max(axis=1).mean()),
        answers=array,
    )


def estimate(settings: Settings, work: Work) -> Estimate:
    """The steady state of a run whose answers look like `work`.

    Raises:
        UserError: the layout cannot be, or an engine has no room for one answer.
    """
    training = _training(_trainer(settings), work.minibatches, work.repeated)
    return _together(settings, _rollout(settings, work), training)


def bound(settings: Settings, work: Work) -> Estimate:
    """A bound below `estimate`, much faster: training as if it could be balanced perfectly."""
    costs = _trainer(settings)
    training = costs.least_seconds(work.minibatches * work.repeated) + costs.publish_seconds()
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
def _training(costs: TrainerCosts, minibatches: tuple[tuple[int, ...], ...], repeated: int) -> float:
    """A step. Repeated minibatches are alike: the first, and each further one with its proximal pass."""
    one = costs.step_seconds(minibatches)
    further = costs.step_seconds(minibatches * 2) - one if repeated > 1 else 0.0
    return one + (repeated - 1) * further + costs.publish_seconds()


def _steady(settings: Settings, work: Work, colocated: bool) -> float:
    """Answers of a batch at the rate at which engines end them, and what the new weights cost each engine.

    With more answers at the same time decoding is more efficient, but each update has more caches to compute anew.
    Slots of groups that are ready and wait for the trainer take from what runs, so that it need not be all that could;
    the best number is assumed.
    """
    engine, engines = EngineCosts.of(settings), layout_of(settings).engines
    control, group = settings.control, settings.rollout.group_size
    # Slots apart from those in training meanwhile.
    slots = (control.max_staleness + colocated) * control.batch_size * group * work.running
    half_way = work.square / work.mean / 2  # what a running answer has so far: long ones run for longer
    cached = settings.simulate.prompt_tokens + half_way
    most = max(1, int(min(slots / engines, engine.max_running, engine.kv_capacity_tokens / cached)))
    numbers = {max(1, most >> halvings) for halvings in range(most.bit_length())}
    return min(_at_steady(settings, work, engine, engines, running, cached) for running in numbers)


def _at_steady(settings: Settings, work: Work, engine: EngineCosts, engines: int, running: int, cached: float) -> float:
    """The same with `running` answers on each engine, of `cached` tokens each in the mean."""
    control, rollout, prompt = settings.control, settings.rollout, settings.simulate.prompt_tokens
    base, per_kv = engine.decode(running)
    step = base + per_kv * running * cached
    decoding = control.batch_size * rollout.group_size * work.mean / (engines * running) * step
    prompts = control.batch_size / engines * engine.prefill_seconds(prompt, prompt * prompt / 2)
    update = engine.update_seconds()
    if rollout.interrupt == "recompute":
        update += engine.prefill_seconds(int(running * cached), running * cached * cached * 2 / 3)
    elif rollout.interrupt == "finish":
        update += work.longest * engine.decode(1)[0]
    if control.overdue != "wait":
        return decoding + prompts + update
    # Nothing is staler than η: the longest answer has η steps to come in, and colocated one more, as none is trained
    # while it runs. What new weights take is no time for it either.
    steps = control.max_staleness + (settings.launch.placement == "colocated")
    return max(decoding + prompts, work.longest * step / steps) + update


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
    return float(total) * each / running + prompts + engine.update_seconds()
