"""A whole run on virtual time: the production controller, gate, fleet and workflow, in a world made of cost models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fleuve.config.settings import Settings
from fleuve.contracts import Sampler, Workflow
from fleuve.control.controller import Controller
from fleuve.control.fleet import Fleet
from fleuve.errors import UserError
from fleuve.observe.trace import Trace
from fleuve.rollout.workflow import SingleTurn
from fleuve.simulate.clock import run_virtual
from fleuve.simulate.engine import SimulatedEngine
from fleuve.simulate.engine_costs import EngineCosts
from fleuve.simulate.layout import layout_of
from fleuve.simulate.lengths import open_lengths
from fleuve.simulate.recorder import Recorder
from fleuve.simulate.result import SimulationResult
from fleuve.simulate.rewarder import SimulatedRewarder
from fleuve.simulate.seats import ADMIT_ROOM
from fleuve.simulate.source import SimulatedSource, prompt_and_sample
from fleuve.simulate.trainer import SimulatedTrainer
from fleuve.simulate.trainer_costs import TrainerCosts
from fleuve.types import GenerationRequest, Prompt, Trajectory

COUNTED = 20
"""Steps of the steady state that are enough, when nobody says."""

LONGEST_FILL = 16
"""Steps in which an unbounded pipeline is taken to have filled."""


LONGEST_PIPELINE = 64
"""Batches that are admitted ahead at most, however stale they may be."""


def warmup_steps(max_staleness: int) -> int:
    """Steps in which the pipeline fills, and all answers do not begin at the same time any more."""
    return min(max_staleness, LONGEST_FILL) + 4


def simulated_steps(settings: Settings) -> int:
    """How many are simulated: `simulate.steps`, or enough for a steady state."""
    enough = warmup_steps(settings.control.max_staleness) + COUNTED
    return min(settings.steps, settings.simulate.steps or enough)


def simulate(
    settings: Settings,
    *,
    trace: Path | None = None,
    progress: Callable[[int], None] | None = None,
    warmup: int | None = None,
) -> SimulationResult:
    """Run `settings` on virtual time.

    Args:
        trace: where the timeline goes, as a real run's `trace.json`.
        progress: is told how many steps are done.
        warmup: steps that are not counted; `warmup_steps` if nobody says.

    Raises:
        UserError: what the settings ask for cannot be; the trace cannot be written.
        ExceptionGroup: as `Controller.run`.
    """
    started = time.perf_counter()
    timeline = None
    if trace is not None:
        try:
            timeline = Trace(trace, 0.0)
        except OSError as error:
            raise UserError(f"{trace}: cannot be written: {error.strerror}") from None
    try:
        recorder = run_virtual(_run(settings, timeline, progress), settings.simulate.seed)
    finally:
        if timeline is not None:
            timeline.close()
    if warmup is None:
        warmup = warmup_steps(settings.control.max_staleness)
    return recorder.result(settings.steps, warmup, time.perf_counter() - started)


async def _run(settings: Settings, trace: Trace | None, progress: Callable[[int], None] | None) -> Recorder:
    simulate, control, rollout = settings.simulate, settings.control, settings.rollout
    engine_costs, draw, longest = EngineCosts.of(settings), open_lengths(settings).draw, rollout.max_new_tokens

    def length(request: GenerationRequest) -> int:
        tokens = draw(*prompt_and_sample(request))
        return tokens if tokens < longest else longest + 1  # it was cut off

    room = min(ADMIT_ROOM, longest)  # an answer never needs more
    engines: list[SimulatedEngine] = []
    together = engines if simulate.finish_together else None
    for i in range(layout_of(settings).engines):
        engines.append(SimulatedEngine(f"worker-{i}", engine_costs, length, together=together, admit_room=room))
    trainer = SimulatedTrainer(
        TrainerCosts.of(settings),
        settings.trainer.minibatches,
        control.max_staleness,
        simulate.learnt,
        simulate.seed,
    )
    rewarder = SimulatedRewarder(simulate.reward_seconds, simulate.reward_sigma, simulate.seed)
    last = simulated_steps(settings)
    recorder = Recorder(engines, trainer, last, lambda: controller.stop(), trace, progress)
    controller = Controller(
        _as_if_longer(settings, last),
        SimulatedSource(simulate.prompt_tokens),
        _Lean(SingleTurn(rollout, settings.seed, lambda _: "", rewarder)),
        _Fleet(engines, settings.seed),
        trainer,
        recorder,
    )
    await controller.run()
    return recorder


def _as_if_longer(settings: Settings, last: int) -> Settings:
    """Where only the first steps of a run are simulated, the pipeline must not run empty at the end of them; nor need
    it hold more than the steps that are looked at could use (without a bound on staleness, the whole run's prompts)."""
    enough = last + min(settings.control.max_staleness, LONGEST_PIPELINE) + 2
    return settings.model_copy(update={"steps": min(settings.steps, enough)})


class _Fleet(Fleet):
    """A fleet whose counters, which the controller asks for every second, are there without a task for each engine."""

    def __init__(self, engines: Sequence[SimulatedEngine], seed: int) -> None:
        super().__init__(engines, seed)
        self._simulated = engines

    async def metrics(self) -> dict[str, float]:
        """What of it is looked at; and routing hears of full caches."""
        for life in self.lives():
            engine = life.engine
            assert isinstance(engine, SimulatedEngine)
            self.router.press(life, life.pressure.look(engine.room()))
        return {"tokens_generated": float(sum(engine.tokens_generated() for engine in self._simulated))}


class _Lean:
    """A workflow whose answers' loss masks take no memory: nobody here trains."""

    def __init__(self, inner: Workflow) -> None:
        self._inner = inner

    async def run(self, engine: Sampler, prompt: Prompt, group: int) -> list[Trajectory]:
        """As the inner one's."""
        trajectories = await self._inner.run(engine, prompt, group)
        for trajectory in trajectories:
            trajectory.loss_mask = np.ndarray((len(trajectory.output_ids),), np.bool_, _TRUE.data, strides=(0,))
        return trajectories


_TRUE = np.ones((), np.bool_)
