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
from fleuve.rollout.workflow import SingleTurn
from fleuve.simulate.candidates import longest_sequence
from fleuve.simulate.clock import run_virtual
from fleuve.simulate.engine import SimulatedEngine
from fleuve.simulate.engine_costs import EngineCosts
from fleuve.simulate.failure import in_one
from fleuve.simulate.layout import layout_of
from fleuve.simulate.lengths import open_lengths
from fleuve.simulate.recorder import Recorder
from fleuve.simulate.result import SimulationResult
from fleuve.simulate.rewarder import SimulatedRewarder
from fleuve.simulate.seats import ADMIT_ROOM
from fleuve.simulate.source import SimulatedSource, prompt_and_sample
from fleuve.simulate.timeline import Timeline
from fleuve.simulate.trainer import SimulatedTrainer
from fleuve.simulate.trainer_costs import TrainerCosts
from fleuve.simulate.window import LONGEST_PIPELINE, Window
from fleuve.types import GenerationRequest, Prompt, Trajectory


def simulated_steps(settings: Settings) -> int:
    """How many are simulated, at most: `simulate.steps`, or enough for a steady state."""
    return _window(settings).last


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
        warmup: steps that are not counted; `window.warmup_steps` if nobody says.

    Raises:
        UserError: what the settings ask for cannot be; the trace cannot be written.
        RunError: a run of these settings would fail, as by deadlines that are too short; says why.
    """
    started = time.perf_counter()
    run = _Run(settings, warmup, progress)
    timeline = None if trace is None else Timeline(trace, run.stop)
    try:
        with in_one():
            recorder = run_virtual(run.run(timeline), settings.simulate.seed)
        if timeline is not None:
            timeline.keep()
    finally:
        if timeline is not None:
            timeline.discard()
    return recorder.result(settings.steps, time.perf_counter() - started)


class _Run:
    """A controller, and a world around it."""

    def __init__(self, settings: Settings, warmup: int | None, progress: Callable[[int], None] | None) -> None:
        self._settings = settings
        self._window = _window(settings, warmup)
        self._progress = progress
        self._controller: Controller | None = None

    def stop(self) -> None:
        """End after the step in progress."""
        if self._controller is not None:
            self._controller.stop()

    async def run(self, timeline: Timeline | None) -> Recorder:
        """To the last step that is looked at."""
        settings, simulate, rollout = self._settings, self._settings.simulate, self._settings.rollout
        engines, trainer = _engines(settings), _trainer(settings)
        rewarder = SimulatedRewarder(simulate.reward_seconds, simulate.reward_sigma, simulate.seed)
        recorder = Recorder(engines, trainer, self._window, self.stop, timeline, self._progress)
        self._controller = Controller(
            _as_if_longer(settings, self._window.last),
            SimulatedSource(simulate.prompt_tokens),
            _Lean(SingleTurn(rollout, settings.seed, lambda _: "", rewarder)),
            _Fleet(engines, settings.seed),
            trainer,
            recorder,
        )
        await self._controller.run()
        return recorder


def _window(settings: Settings, warmup: int | None = None) -> Window:
    return Window(settings.control.max_staleness, settings.steps, settings.simulate.steps, warmup)


def _engines(settings: Settings) -> list[SimulatedEngine]:
    """With the deadlines of a real run's clients.

    Raises:
        UserError: an engine, or a micro-batch, has no room for the longest sequence.
    """
    rollout, costs = settings.rollout, EngineCosts.of(settings)
    _check_budget(settings)
    draw, longest = open_lengths(settings).draw, rollout.max_new_tokens

    def length(request: GenerationRequest) -> int:
        tokens = draw(*prompt_and_sample(request))
        return tokens if tokens < longest else longest + 1  # it was cut off

    engines: list[SimulatedEngine] = []
    for i in range(layout_of(settings).engines):
        engines.append(
            SimulatedEngine(
                f"worker-{i}",
                costs,
                length,
                together=engines if settings.simulate.finish_together else None,
                admit_room=min(ADMIT_ROOM, longest),  # an answer never needs more
                request_timeout=rollout.request_timeout + settings.longest_pause,
                update_timeout=rollout.update_timeout,
            )
        )
    return engines


def _check_budget(settings: Settings) -> None:
    budget, longest = settings.trainer.token_budget, longest_sequence(settings)
    if budget < longest:
        raise UserError(
            f"trainer.token_budget = {budget} is too small for the longest sequence of {longest} tokens "
            f"(simulate.prompt_tokens = {settings.simulate.prompt_tokens}, and rollout.max_new_tokens = "
            f"{settings.rollout.max_new_tokens}); give it {longest} or more"
        )


def _trainer(settings: Settings) -> SimulatedTrainer:
    return SimulatedTrainer(
        TrainerCosts.of(settings),
        settings.trainer.minibatches,
        settings.control.max_staleness,
        settings.simulate.learnt,
        settings.simulate.seed,
        settings.trainer.step_timeout,
    )


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
