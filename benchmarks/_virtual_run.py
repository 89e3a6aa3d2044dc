"""A whole training run in one process, on one thread and on virtual time: the same command, the same numbers.

The controller, the embedded engine, the trainer, the workflow and the data are the real ones. Only the processes
between them are missing, and the clock: what a step of the engine and a step of the trainer take is said by `Costs`, in
virtual seconds, and not by how busy this machine is. So interruptions, answers of several versions, overdue groups and
staleness come about as in any run, and are a function of the settings and the seed alone.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fleuve.config.settings import Settings
from fleuve.contracts import RolloutError
from fleuve.control.controller import Controller
from fleuve.control.fleet import Fleet
from fleuve.data.open import load_prompts, open_source
from fleuve.engine.engine import Engine, Outcome, Update
from fleuve.engine.options import EngineOptions
from fleuve.engine.service import open_engine
from fleuve.evaluate.evaluate import EvaluationResult, evaluate
from fleuve.modeling.tokenizer import answer_decoder
from fleuve.rewards.exact import normalise, number
from fleuve.rewards.extraction import extract, reference
from fleuve.rollout.sampling import sampling_params
from fleuve.rollout.workflow import SingleTurn
from fleuve.simulate.clock import run_virtual
from fleuve.train.metrics import learnt_tokens
from fleuve.train.trainer import Trainer
from fleuve.types import (
    Batch,
    Completion,
    GenerationRequest,
    Interrupt,
    Prompt,
    StepResult,
    Verdict,
    WeightFile,
    WeightUpdate,
)
from fleuve.weights.store import WeightStore, read_weights

LONGEST_RUN = 1e6
"""Virtual seconds: a run that has not ended by then is stuck."""


@dataclass(frozen=True)
class Costs:
    """`decode_seconds`: virtual seconds of one engine step, whatever is in it. `training_ratio`: how many times as long
    the trainer takes for a batch as a full engine takes to generate it; above 1, rollout is the faster side."""

    decode_seconds: float = 0.01
    training_ratio: float = 2.0

    def training_seconds(self, batch: Batch, max_running: int) -> float:
        """Virtual seconds of one training step."""
        tokens = sum(len(t.output_ids) for t in batch.trajectories)
        return self.training_ratio * self.decode_seconds * tokens / max_running


class VirtualEngine:
    """Implements `contracts.RolloutEngine` on the engine itself: what `engine.loop` does with a thread, done by a task.
    `run` must be running."""

    def __init__(self, engine: Engine, step_seconds: float) -> None:
        self.engine = engine
        self._step_seconds = step_seconds
        self._answers: dict[str, asyncio.Future[Completion]] = {}
        self._landings: dict[Update, asyncio.Future[WeightUpdate]] = {}
        self._work = asyncio.Event()
        self._paused = False

    async def run(self) -> None:
        """Step whenever there is something to do; results are out when the step's time is over."""
        while True:
            await self._work.wait()
            outcome = Outcome()
            if self._paused:
                self.engine.apply_updates(outcome)
            else:
                outcome = self.engine.step()
            await asyncio.sleep(self._step_seconds)
            self._settle(outcome)
            if self._paused or self.engine.idle:
                self._work.clear()

    async def generate(self, request: GenerationRequest) -> Completion:
        """One answer; cancelling aborts it."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.engine.add(request)
        self._answers[request.request_id] = answer
        self._work.set()
        try:
            return await answer
        finally:
            del self._answers[request.request_id]
            self.engine.abort([request.request_id])  # unknown unless this was cancelled

    async def update_weights(self, weights: WeightFile, interrupt: Interrupt) -> WeightUpdate:
        """Lands between two steps, as `interrupt` says."""
        tensors = read_weights(weights)
        self.engine.parameters.check(tensors)
        update = Update(version=weights.version, tensors=tensors, interrupt=interrupt)
        landing: asyncio.Future[WeightUpdate] = asyncio.get_running_loop().create_future()
        self._landings[update] = landing
        self.engine.request_update(update)
        self._work.set()
        return await landing

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with what they have."""
        self._settle(Outcome(ended=list(self.engine.abort(request_ids))))

    async def pause(self) -> None:
        """No step begins until `resume`."""
        self._paused = True

    async def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._work.set()

    async def health(self) -> int:
        """The version that it samples with."""
        return self.engine.version

    async def metrics(self) -> dict[str, float]:
        """The engine's counters."""
        return self.engine.metrics()

    def _settle(self, outcome: Outcome) -> None:
        for update in outcome.updated:
            assert update.result is not None
            self._landings.pop(update).set_result(update.result)
        for end in outcome.ended:
            request_id = end.request_id if isinstance(end, Completion) else end[0]
            answer = self._answers.get(request_id)
            if answer is None or answer.done():
                continue  # cancelled while the step ran
            if isinstance(end, Completion):
                answer.set_result(end)
            else:
                answer.set_exception(RolloutError(str(end[1])))


class VirtualTrainer:
    """Implements `contracts.Trainer`: the clock stands still while the real trainer works, then its cost passes.
    `kept`: the weights of the versions that are asked for, to be evaluated later."""

    def __init__(self, trainer: Trainer, costs: Costs, max_running: int, keep: Collection[int]) -> None:
        self.trainer = trainer
        self.kept: dict[int, dict[str, Tensor]] = {}
        self._keep = keep
        self._costs = costs
        self._max_running = max_running

    async def step(self, batch: Batch) -> StepResult:
        """One training step."""
        result = self.trainer.step(batch)
        await asyncio.sleep(self._costs.training_seconds(batch, self._max_running))
        return result

    async def interrupt(self) -> None:
        """A step is over before anybody could."""

    async def publish(self, served: int) -> WeightFile:
        """See `Trainer.publish`."""
        file = self.trainer.publish(served)
        if file.version in self._keep:
            self.kept[file.version] = read_weights(file)
        return file

    async def save(self, path: Path) -> None:
        """See `Trainer.save`."""
        self.trainer.save(path)

    async def load(self, path: Path) -> None:
        """See `Trainer.load`."""
        self.trainer.load(path)


class StrictRewarder:
    """Implements `contracts.Rewarder` by the strict half of the `math` verifier: the final answer as a string or an
    exact number, which is all that integers need. Nothing here evaluates what the model wrote."""

    async def score(self, prompt: Prompt, text: str) -> Verdict:
        """1.0 or 0.0."""
        return Verdict(score=float(strictly_equal(text, prompt.answer)))


def strictly_equal(text: str, answer: str) -> bool:
    """Whether the final answer in `text` is written like the reference, or is the same number."""
    given, wanted = extract(text), reference(answer)
    if not given or not wanted:
        return False
    if normalise(given) == normalise(wanted) != "":
        return True
    value = number(given)
    return value is not None and value == number(wanted)


@dataclass
class Steps:
    """Implements `contracts.Observer`: keeps each step's metrics and the staleness of the tokens it learnt from."""

    oldest_learnt: int | None  # staleness beyond which tokens are masked
    metrics: list[dict[str, float]] = field(default_factory=list)
    staleness: list[tuple[int, int, int]] = field(default_factory=list)  # (tokens, their sum, the largest) of each step
    notes: list[str] = field(default_factory=list)
    answers: int = 0

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        """Counted over all the tokens that get a gradient, those of answers with advantage zero included."""
        oldest = None if self.oldest_learnt is None else batch.version - self.oldest_learnt
        learnt = [batch.version - t.versions[learnt_tokens(t, oldest)] for t in batch.trajectories]
        values = np.concatenate(learnt) if learnt else np.zeros(0, np.int32)
        self.metrics.append(metrics)
        self.answers += len(batch.trajectories)
        self.staleness.append((len(values), int(values.sum()), int(values.max(initial=0))))

    def realised(self) -> tuple[float, int]:
        """Mean staleness over the second half's learnt tokens, and the largest of all."""
        half = self.staleness[len(self.staleness) // 2 :]
        tokens = sum(count for count, _, _ in half)
        return sum(total for _, total, _ in half) / max(tokens, 1), max(most for _, _, most in self.staleness)

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None: ...

    def count(self, name: str, value: float, at: float) -> None: ...

    def activity(self, who: str, what: str) -> None: ...

    def note(self, message: str) -> None:
        """Kept."""
        self.notes.append(message)


@dataclass(frozen=True)
class VirtualResult:
    """`evaluations`: by version, on problems that training never sees. `cpu_seconds` are of all."""

    steps: Steps
    evaluations: dict[int, EvaluationResult]
    virtual_seconds: float
    cpu_seconds: float


def run(
    settings: Settings,
    costs: Costs = Costs(),
    *,
    evaluated: Collection[int] = (),
    problems: int = 256,
    samples: int = 4,
) -> VirtualResult:
    """Train by `settings` from `settings.model` on virtual time; then evaluate the versions `evaluated` and the last.

    An evaluation takes no time of the run's. It is on `settings.data.eval`, `problems` × `samples` answers, at the
    training's temperature.

    Raises:
        UserError: the model or the data cannot be opened.
    """
    torch.set_num_threads(1)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        keep = {*evaluated, settings.steps}
        steps, weights, seconds = run_virtual(_train(settings, costs, keep, Path(scratch)))
    evaluations = run_virtual(_evaluate(settings, weights, problems, samples))
    return VirtualResult(steps, evaluations, seconds, time.process_time() - started)


def evaluate_initial(settings: Settings, *, problems: int = 256, samples: int = 4) -> EvaluationResult:
    """Evaluate the weights in `settings.model` as `run` evaluates the trained ones."""
    torch.set_num_threads(1)
    return run_virtual(_evaluate(settings, {0: {}}, problems, samples))[0]


async def _train(
    settings: Settings, costs: Costs, keep: Collection[int], scratch: Path
) -> tuple[Steps, dict[int, dict[str, Tensor]], float]:
    control = settings.control
    assert settings.launch.placement == "disaggregated"
    assert settings.rollout.workers == 1
    engine = VirtualEngine(_engine(settings), costs.decode_seconds)
    tokenizer = engine.engine.tokenizer
    store = WeightStore(scratch / "weights", settings.weights.keep)
    trainer = VirtualTrainer(Trainer(settings, store), costs, settings.rollout.max_running, keep)
    steps = Steps(control.max_staleness if control.overdue == "mask" else None)
    controller = Controller(
        settings,
        open_source(settings.data.train, settings.data, tokenizer, settings.seed),
        SingleTurn(settings.rollout, settings.seed, answer_decoder(tokenizer), StrictRewarder()),
        Fleet([engine], settings.seed),
        trainer,
        steps,
    )
    async with asyncio.timeout(LONGEST_RUN), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(engine.run())
        await controller.run()
        serving.cancel()
    store.close()
    return steps, trainer.kept, asyncio.get_running_loop().time()


def _engine(settings: Settings) -> Engine:
    rollout = settings.rollout
    return open_engine(
        EngineOptions(
            model=settings.model.path,
            dtype=rollout.dtype,
            device=rollout.device,
            threads=1,
            max_running=rollout.max_running,
            kv_cache_tokens=rollout.kv_cache_tokens,
            prefill_tokens=rollout.prefill_tokens,
        )
    )


async def _evaluate(
    settings: Settings, weights: Mapping[int, dict[str, Tensor]], problems: int, samples: int
) -> dict[int, EvaluationResult]:
    """By version; the same problems and random numbers each time. No tensors: those in `settings.model`."""
    assert settings.data.eval is not None
    engine = VirtualEngine(_engine(settings), Costs().decode_seconds)
    tokenizer = engine.engine.tokenizer
    prompts = load_prompts(settings.data.eval, settings.data, tokenizer, problems)
    results = {}
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(engine.run())
        for version, tensors in sorted(weights.items()):
            if tensors:
                engine.engine.request_update(Update(version=version, tensors=tensors, interrupt="recompute"))
                engine.engine.apply_updates(Outcome())
            results[version] = await evaluate(
                engine.generate,
                StrictRewarder(),
                answer_decoder(tokenizer),
                prompts,
                sampling_params(settings.rollout, settings.rollout.temperature),
                samples=samples,
                concurrency=settings.rollout.max_running,
            )
        serving.cancel()
    return results
