"""A small world on virtual time for the real controller: engines that sample a token every so often, a trainer that
takes its time, faults on request. Everything is drawn from one seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from fleuve.config.settings import Settings
from fleuve.contracts import PromptSource, RolloutError, Sampler, WorkerLostError
from fleuve.contracts import Workflow as RunWorkflow
from fleuve.control.controller import Checkpoint, Controller
from fleuve.control.fleet import Fleet
from fleuve.control.journal import Journal
from fleuve.control.past import Past
from fleuve.types import (
    Batch,
    Completion,
    GenerationRequest,
    Interrupt,
    Prompt,
    StepResult,
    Trajectory,
    WeightFile,
    WeightUpdate,
)


def now() -> float:
    return asyncio.get_running_loop().time()


class Source:
    def __init__(self) -> None:
        self.issued: Counter[str] = Counter()
        self.returned: list[Prompt] = []
        self._next = 0

    def next(self) -> Prompt:
        if self.returned:
            prompt = self.returned.pop(0)
        else:
            prompt = Prompt(id=f"p{self._next}", input_ids=[1, 2], text="", answer="")
            self._next += 1
        self.issued[prompt.id] += 1
        return prompt

    def give_back(self, prompt: Prompt) -> None:
        self.returned.append(prompt)

    def state(self) -> dict[str, object]:
        return {"next": self._next}

    def restore(self, state: dict[str, object]) -> None:
        self._next = int(str(state["next"]))


class Engine:
    """Samples one token per `token_seconds`; every token is stamped with the version loaded at that moment."""

    def __init__(self, rng: random.Random, length: Callable[[random.Random], int], update_seconds: float) -> None:
        self.rng, self.length, self.update_seconds = rng, length, update_seconds
        self.version = 0
        self.served: list[int] = [0]
        self.active = 0
        self.tokens = 0
        self.broken = False
        self.token_seconds = 0.01
        self._running = asyncio.Event()
        self._running.set()
        self.fault: Callable[[GenerationRequest], str] = lambda _: ""

    async def generate(self, request: GenerationRequest) -> Completion:
        match self.fault(request):
            case "hang":
                await asyncio.Event().wait()
            case "raise":
                raise RolloutError(f"{request.request_id} failed")
        versions: list[int] = []
        self.active += 1
        try:
            for _ in range(self.length(self.rng)):
                await self._running.wait()
                await asyncio.sleep(self.token_seconds * self.rng.uniform(0.8, 1.2))
                await self._running.wait()
                versions.append(self.version)
                self.tokens += 1
        finally:
            self.active -= 1
        n = len(versions)
        return Completion(
            request_id=request.request_id,
            output_ids=[0] * n,
            logprobs=[0.0] * n,
            versions=versions,
            finish_reason="stop",
        )

    async def health(self) -> int:
        if self.broken:
            raise WorkerLostError("worker-0: connection lost")
        return self.version

    async def update_weights(self, weights: WeightFile, interrupt: Interrupt) -> WeightUpdate:
        await asyncio.sleep(self.update_seconds * self.rng.uniform(0.5, 1.5))
        assert self._running.is_set() or interrupt != "finish"  # the answers it waits for could not end
        self.version = weights.version
        self.served.append(weights.version)
        return WeightUpdate(version=weights.version, interrupted=self.active, seconds=0.0)

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def metrics(self) -> dict[str, float]:
        if self.broken:
            raise WorkerLostError("worker-0: connection lost")
        return {"tokens_generated": float(self.tokens)}


class Workflow:
    def __init__(self, group_size: int, verdict: Callable[[Prompt], float | None]) -> None:
        self.group_size, self.verdict = group_size, verdict

    async def run(self, engine: Sampler, prompt: Prompt, group: int) -> list[Trajectory]:
        from fleuve.types import SamplingParams

        sampling = SamplingParams(max_new_tokens=1000)
        out = []
        for sample in range(self.group_size):
            seed = zlib.crc32(f"{prompt.id}/{sample}".encode())
            request = GenerationRequest(
                request_id=f"{group}/{sample}",
                input_ids=prompt.input_ids,
                sampling=msgspec.structs.replace(sampling, seed=seed),
            )
            completion = await engine.generate(request)
            n = len(completion.output_ids)
            out.append(
                Trajectory(
                    prompt_ids=np.asarray(prompt.input_ids, np.int32),
                    output_ids=np.zeros(n, np.int32),
                    logprobs=np.zeros(n, np.float32),
                    versions=np.asarray(completion.versions, np.int32),
                    loss_mask=np.ones(n, np.bool_),
                    finish_reason=completion.finish_reason,
                    reward=self.verdict(prompt),
                    excluded="verifier crashed",
                )
            )
        return out


class Trainer:
    def __init__(self, rng: random.Random, seconds: float, engines: list[Engine]) -> None:
        self.rng, self.seconds, self.engines = rng, seconds, engines
        self.version = 0
        self.batches: list[Batch] = []
        self.generated_while_stepping = 0
        self.interruptions = 0
        self._cut = asyncio.Event()

    async def step(self, batch: Batch) -> StepResult:
        assert batch.version == self.version
        before = sum(e.tokens for e in self.engines)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.seconds * self.rng.uniform(0.5, 1.5)):
                await self._cut.wait()
        self.generated_while_stepping += sum(e.tokens for e in self.engines) - before
        if self._cut.is_set():  # half of the batch was trained
            batch = Batch(version=batch.version, groups=batch.groups[: len(batch.groups) // 2])
        self.batches.append(batch)
        self.version += 1
        advantages: list[list[float | None]] = [[0.0] * len(g.trajectories) for g in batch.groups]
        return StepResult(
            version=self.version,
            metrics={"tokens/trained": 1.0},
            advantages=advantages,
            trained=[g.id for g in batch.groups],
        )

    async def interrupt(self) -> None:
        self.interruptions += 1
        self._cut.set()

    async def publish(self, served: int) -> WeightFile:
        return WeightFile(version=self.version, path="", bytes=0, checksum="")

    async def save(self, path: Path) -> None: ...

    async def load(self, path: Path) -> None: ...


class Notes:
    """Keeps what the controller reports."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.notes: list[str] = []

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self.steps.append(metrics)

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None:
        assert end >= start

    def count(self, name: str, value: float, at: float) -> None: ...

    def activity(self, who: str, what: str) -> None: ...

    def note(self, message: str) -> None:
        self.notes.append(message)


def heavy_tail(rng: random.Random) -> int:
    """3 % of the answers are 20 times as long as the others."""
    return 200 if rng.random() < 0.03 else 10


class World:
    """Build inside a running loop; `await world.controller.run()`."""

    def __init__(
        self,
        seed: int = 0,
        *,
        steps: int = 20,
        batch_size: int = 4,
        eta: int = 2,
        overdue: str = "wait",
        placement: str = "disaggregated",
        workers: int = 2,
        group_size: int = 1,
        train_seconds: float = 0.1,
        update_seconds: float = 0.02,
        group_timeout: float = 60.0,
        length: Callable[[random.Random], int] = heavy_tail,
        verdict: Callable[[Prompt], float | None] = lambda _: 1.0,
        evaluate_every: int = 0,
        interrupt: str = "recompute",
        algorithm: dict[str, object] | None = None,
        source: PromptSource | None = None,
        fleet: Fleet | None = None,
        engines: list[Engine] | None = None,
        checkpoint_every: int = 0,
        checkpoint: Checkpoint | None = None,
        journal: Journal | None = None,
        past: Past | None = None,
        workflow: RunWorkflow | None = None,
    ) -> None:
        rng = random.Random(seed)
        self.settings = Settings.model_validate(
            {
                "run_dir": "unused",
                "steps": steps,
                "seed": seed,
                "model": {"path": "unused"},
                "data": {"train": "unused"},
                "rollout": {"group_size": group_size, "workers": workers, "interrupt": interrupt},
                "control": {
                    "batch_size": batch_size,
                    "max_staleness": eta,
                    "overdue": overdue,
                    "group_timeout": group_timeout,
                },
                "trainer": {"minibatches": 1},
                "algorithm": algorithm or {},
                "launch": {"placement": placement},
                "evaluate": {"every": evaluate_every},
                "checkpoint": {"every": checkpoint_every, "every_minutes": 0},
            }
        )
        self.engines = engines or [Engine(random.Random(rng.random()), length, update_seconds) for _ in range(workers)]
        self.fleet = fleet or Fleet(self.engines, seed)
        self.trainer = Trainer(random.Random(rng.random()), train_seconds, self.engines)
        self.source = source or Source()
        self.observer = Notes()
        self.evaluated: list[tuple[int, set[int]]] = []
        self.controller = Controller(
            self.settings,
            self.source,
            workflow or Workflow(group_size, verdict),
            self.fleet,
            self.trainer,
            self.observer,
            evaluate=self.evaluate if evaluate_every else None,
            checkpoint=checkpoint,
            journal=journal,
            past=past,
        )

    async def evaluate(self, version: int) -> dict[str, float]:
        """Watches the engines' versions for a while, as an evaluation's requests would."""
        seen: set[int] = set()
        for _ in range(50):
            await asyncio.sleep(0.01)
            seen |= {e.version for e in self.engines}
        self.evaluated.append((version, seen))
        return {"eval/test/pass@1": 0.5}

    def staleness(self) -> list[int]:
        """Of every token trained."""
        return [
            batch.version - int(v) for batch in self.trainer.batches for t in batch.trajectories for v in t.versions
        ]

    def trained(self) -> Counter[str]:
        return Counter(g.prompt.id for b in self.trainer.batches for g in b.groups)
