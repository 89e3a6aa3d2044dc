"""What the controller needs of the world: a prompt source, a fleet of rollout engines, a rewarder, a trainer.

The real ones speak HTTP or pipes to other processes; the simulator's follow cost models on virtual time. The
controller cannot tell which it drives. Every method that waits on another process ends by its own deadline in an error
that names what it waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from fleuve.types import (
    Batch,
    Completion,
    GenerationRequest,
    Interrupt,
    Progress,
    Prompt,
    StepResult,
    Trajectory,
    Verdict,
    WeightFile,
    WeightUpdate,
)


class PromptSource(Protocol):
    """An endless, resumable stream of prompts."""

    def next(self) -> Prompt:
        """The next prompt; passes over the data set again (reshuffled) when it ends."""

    def give_back(self, prompt: Prompt) -> None:
        """A prompt whose group was dropped: it is served again before new ones."""

    def state(self) -> dict[str, object]:
        """The cursor, JSON-serialisable."""

    def restore(self, state: dict[str, object]) -> None:
        """Continue from a cursor that `state` returned."""


class Sampler(Protocol):
    """What a workflow sees of the fleet: answers come, whichever worker they come from."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """One answer.

        Raises:
            RolloutError: it failed.
        """


@runtime_checkable
class Remembering(Sampler, Protocol):
    """A sampler whose answers outlive the controller: asked for one again that it has, it gives that one. A workflow
    that knows verdicts of an earlier life need not score anew; it may ignore them, or get a mere `Sampler`."""

    def verdict(self, request_id: str) -> Verdict | None:
        """That of an earlier life on the answer to this request; None if there is none."""

    def judged(self, request_id: str, verdict: Verdict) -> None:
        """This is the verdict on the answer to that request; it will be remembered."""


class RolloutEngine(Sampler, Protocol):
    """One rollout worker (design, section 4.2). Where nobody answers at all, every method raises WorkerLostError."""

    async def health(self) -> int:
        """The policy version that it samples with; answers at once, whatever it computes, and while paused."""

    async def update_weights(self, weights: WeightFile, interrupt: Interrupt) -> WeightUpdate: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def metrics(self) -> dict[str, float]: ...


@runtime_checkable
class ContinuingEngine(RolloutEngine, Protocol):
    """A rollout worker whose unfinished answers can be taken up by another one: it tells how far it has come with them,
    and it goes on from `GenerationRequest.output_ids`."""

    async def progress(self, known: Mapping[str, int]) -> list[Progress]:
        """What has come of answers in flight beyond the tokens `known` of each; those not in flight are left out."""


class Supervisor(Protocol):
    """Ends and starts the processes behind rollout workers, by name."""

    async def kill(self, worker: str) -> str:
        """End what is left of it, at once; nothing samples after this returns. What it was found to have come to, in a
        line (`killed by SIGKILL`). Also for a worker that is gone already, or was never started."""

    async def start(self, worker: str) -> RolloutEngine:
        """A fresh process under that name, with the weights that the run began with, once it answers.

        Raises:
            RolloutError: it did not come up in time.
        """


class Rewarder(Protocol):
    """Scores one answer; never raises for what the answer or the verifier does (that is a Verdict without score)."""

    async def score(self, prompt: Prompt, text: str) -> Verdict: ...


class Workflow(Protocol):
    """One prompt's episode: samples the group's answers from an engine and has them scored."""

    async def run(self, engine: Sampler, prompt: Prompt, group: int) -> list[Trajectory]:
        """The answers to `prompt`; `group` names their requests, no two of a group alike. In a run that is continued
        it is called again for a group that was running: if it makes a request again that it made then (same id, input
        and seed), it gets the answer of then, as far as that had come.

        Raises:
            RolloutError: the engine failed one of them.
        """


class Trainer(Protocol):
    """Design, section 4.3."""

    async def step(self, batch: Batch) -> StepResult: ...

    async def interrupt(self) -> None:
        """End the step in progress after the micro-batch it is at. Its result names the groups that were trained."""

    async def publish(self, served: int) -> WeightFile:
        """Write the current version's weights where rollout workers can read them; files of versions before `served`,
        which no worker asks for any more, are removed."""

    async def save(self, path: Path) -> None: ...

    async def load(self, path: Path) -> None: ...


class RunError(RuntimeError):
    """The run cannot go on, and not for a fault in Fleuve: what happened, and where to look."""


class RolloutError(RuntimeError):
    """A rollout worker answered with an error, not in time, or not at all. Names the worker and the request."""


class WorkerLostError(RolloutError):
    """A rollout worker did not answer at all: its connection was lost or refused, or it was given up meanwhile."""


class TrainerError(RuntimeError):
    """The trainer failed, did not answer in time, or died."""


class TrainerLostError(TrainerError):
    """The trainer did not answer at all: it is dead, or hangs."""


class Observer(Protocol):
    """Where the controller reports. Times are seconds of the event loop's clock."""

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        """One trained step: its metrics, and its groups with rewards and advantages filled in."""

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None:
        """Something that took from `start` to `end` on `track` (`trainer`, `worker-0`, `controller`, `group`)."""

    def count(self, name: str, value: float, at: float) -> None:
        """A value that changes over time (`rollout/running`, …), for the trace and the live view."""

    def activity(self, who: str, what: str) -> None:
        """What a worker or the trainer is doing right now, for the live view."""

    def note(self, message: str) -> None:
        """One line for the log and the live view."""
