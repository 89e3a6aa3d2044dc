"""The rollout workers as one: routes groups to them, and brings all of them to a new policy version.

Workers die, hang, join and leave without harm: a group whose worker is lost goes on with another one (`lease.py`), an
update that fails on a worker costs that worker and not the run, and a worker gets groups only once it has the newest
weights. Who is well is decided here; `caretaker.py` restarts the others.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from fleuve.contracts import Observer, RolloutEngine, RolloutError, Supervisor, WorkerLostError
from fleuve.control.caretaker import Caretaker
from fleuve.control.health import Health, HealthPolicy
from fleuve.control.lease import Lease
from fleuve.control.router import ExpectedLength, Router
from fleuve.control.signal import Signal
from fleuve.control.worker import REMOVED, Life, Worker
from fleuve.types import Interrupt, WeightFile

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}")
"""A worker's: it names files too."""
REFUSED_AGAIN = 0.2
"""Seconds between a probe that was refused and the next."""


@dataclass(frozen=True)
class FleetPolicy:
    """How workers are judged; seconds without any after which the run ends; workers that one group may lose; whether an
    answer must be of one version alone, and so begin again where it would go on with another."""

    health: HealthPolicy = field(default_factory=HealthPolicy)
    no_worker_timeout: float = 600.0
    losses: int = 3
    one_version: bool = False


class Fleet:
    """The engines given are `worker-0`, `worker-1`, … and have the weights of `version`, as has every engine that
    `supervisor` starts. Without a supervisor the dead stay dead. `tend` must run for anything to be noticed that no
    request runs into. The model has `vocabulary` tokens, if that is known.

    Only a worker that is living samples what is trained: the moment one is given up, nothing more is taken from it.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        seed: int,
        version: int = 0,
        *,
        supervisor: Supervisor | None = None,
        policy: FleetPolicy = FleetPolicy(),
        observer: Observer | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.policy = policy
        self.vocabulary = vocabulary
        self.initial_version = version
        self.router: Router[Life] = Router(seed)
        self.lengths = ExpectedLength()
        self.workers: dict[str, Worker] = {}
        self.weights: WeightFile | None = None
        """The newest given to `update`; None: still the initial version."""
        self.paused = False
        self.moved = 0
        """Answers that were taken up by another worker."""
        self.kept = 0
        """Tokens of theirs that were not sampled again."""
        self.restarts = 0
        self.changed = Signal()
        self._observer = observer
        self._served: int | None = None  # as last looked up; None: look again
        self._gone = 0.0  # tokens that lives which are over had generated
        self._added = len(engines)
        self._probes: dict[asyncio.Task[None], None] = {}  # under way, also of workers that have left since
        for index, engine in enumerate(engines):
            name = f"worker-{index}"
            life = Life(name, engine, version)
            self.workers[name] = Worker(name, policy.health, life)
            self.router.join(life)
        self._caretaker = Caretaker(self, supervisor)

    @property
    def newest_version(self) -> int:
        """The version that workers are brought to."""
        return self.initial_version if self.weights is None else self.weights.version

    @property
    def served_version(self) -> int:
        """The oldest version that any living worker may still sample with. It never goes back, since a worker comes to
        life with the newest. After an update this is its version; during one, still the version before."""
        if self._served is None:
            # Asked for at every change of anything: not to be looked up in hundreds of workers each time.
            self._served = min((life.version for life in self.lives()), default=self.newest_version)
        return self._served

    def lives(self) -> list[Life]:
        """Of the living workers."""
        return [w.life for w in self.workers.values() if w.life is not None and w.health.living]

    # --- groups -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def worker(self, answers: int) -> AsyncIterator[Lease]:
        """Where `answers` of one group are sampled, for as long as they are in flight."""
        lease = Lease(self, answers, self.policy.losses)
        try:
            yield lease
        finally:
            lease.release()

    async def open(self) -> None:
        """Waits until a worker takes new groups. The deadline is `tend`'s."""
        await self.changed.until(lambda: self.router.open)

    async def well(self, life: Life) -> bool:
        """Whether `life`, which failed a request, is there and answers: a probe decides."""
        self.doubt(life)
        worker = self.workers.get(life.name)
        if worker is not None and worker.life is life and worker.decision is not None:
            await asyncio.shield(worker.decision)
        return not life.over

    def doubt(self, life: Life) -> None:
        """A request failed on `life`: no new groups until a probe has decided what became of it."""
        worker = self.workers.get(life.name)
        if worker is not None and worker.life is life and worker.health.living:
            worker.health.doubt()
            self.settle(worker)
            self.probe(worker)

    # --- weights ----------------------------------------------------------------------------------------------------

    async def update(self, weights: WeightFile, interrupt: Interrupt) -> int:
        """Bring every worker to `weights`; how many answers were interrupted. A worker that refuses, fails, or does
        not answer in time is given up: nothing that it samples with older weights is taken."""
        self.weights, self._served = weights, None

        async def one(life: Life) -> int:
            try:
                reply = await life.call(lambda engine: engine.update_weights(weights, interrupt))
            except RolloutError as error:
                self.lose(life, f"the update to version {weights.version} failed: {error}")
                return 0
            life.version, self._served = weights.version, None
            return reply.interrupted

        return sum(await self._all(one))

    async def pause(self) -> None:
        """No worker computes until `resume`; answers in flight stay where they are."""
        self.paused = True
        await self._all(lambda life: self._or_lose(life, lambda engine: engine.pause()))

    async def resume(self) -> None:
        """The workers go on."""
        self.paused = False
        await self._all(lambda life: self._or_lose(life, lambda engine: engine.resume()))

    async def _or_lose(self, life: Life, what: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        try:
            await life.call(what)
        except RolloutError as error:
            self.lose(life, str(error))

    async def _all(self, what: Callable[[Life], Coroutine[Any, Any, Any]]) -> list[Any]:
        async with asyncio.TaskGroup() as tasks:
            done = [tasks.create_task(what(life)) for life in self.lives()]
        return [task.result() for task in done]

    # --- members ----------------------------------------------------------------------------------------------------

    async def tend(self) -> None:
        """Probe, restart and resync the workers; never returns.

        Raises:
            RunError: there has been no living worker for `no_worker_timeout`, or without a supervisor is none left.
        """
        await self._caretaker.run()

    def add(self, name: str | None = None) -> str:
        """One more worker: it is started, gets the newest weights, and then groups. Returns its name.

        Raises:
            ValueError: there is one of that name, it is none, or there is nobody who could start it.
        """
        if not self._caretaker.can_start:
            raise ValueError("this run cannot start workers")
        if name is None:
            name, self._added = f"worker-{self._added}", self._added + 1
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a worker: letters, digits, - and _ make one, 60 at most")
        if name in self.workers:
            raise ValueError(f"there is a worker {name} already")
        self.workers[name] = worker = Worker(name, self.policy.health, None, self.now())
        self._caretaker.take_on(worker)
        self.note(f"{name} joins")
        return name

    def remove(self, name: str, at_once: bool = False) -> None:
        """`name` leaves: it gets no new groups, and ends when its answers in flight have; `at_once`, others take those
        up.

        Raises:
            ValueError: there is none of that name, or it is the last, or the last that can sample.
        """
        if name not in self.workers:
            raise ValueError(f"there is no worker {name}: there are {', '.join(self.workers)}")
        worker = self.workers[name]
        others = [other for other in self.workers.values() if other is not worker and not other.leaving]
        if not others and not worker.leaving:
            raise ValueError(f"{name} is the last worker")
        if worker.health.living and not worker.leaving and not any(other.health.living for other in others):
            states = ", ".join(f"{other.name} is {other.health.state.value}" for other in others)
            raise ValueError(f"{name} is the last worker that can sample: {states}")
        worker.leaving = True
        self.settle(worker)
        if at_once and worker.life is not None:
            self.lose(worker.life, REMOVED)
        self.note(f"{name} leaves")

    async def metrics(self) -> dict[str, float]:
        """`tokens_generated`, by all workers that ever were; `running` and `waiting`, the answers that workers have."""
        seen = await self._all(self._metrics)
        totals = {name: sum(metrics.get(name, 0.0) for metrics in seen) for name in ("running", "waiting")}
        return {**totals, "tokens_generated": self._gone + sum(life.generated for life in self.lives())}

    async def _metrics(self, life: Life) -> dict[str, float]:
        try:
            metrics = await life.call(lambda engine: engine.metrics())
        except WorkerLostError:
            self.doubt(life)
            return {}
        except RolloutError as error:
            # Unlike a probe, this waits for the engine itself, which may be stuck behind a server that is well.
            self.lose(life, str(error))
            return {}
        life.generated = metrics["tokens_generated"]
        self.router.press(life, life.pressure.look(metrics))
        return metrics

    def states(self) -> dict[str, Health]:
        """Of every worker, by name."""
        return {name: worker.health.state for name, worker in self.workers.items()}

    def gauges(self) -> dict[str, float]:
        """For a step's row of metrics."""
        healthy = sum(state is Health.HEALTHY for state in self.states().values())
        return {
            "fleet/healthy": float(healthy),
            "fleet/restarts": float(self.restarts),
            "fleet/moved_answers": float(self.moved),
            "fleet/kept_tokens": float(self.kept),
        }

    # --- health -----------------------------------------------------------------------------------------------------

    def probe(self, worker: Worker) -> asyncio.Task[None]:
        """Ask a worker that is there until it is healthy or dead; the question that is under way, if one is."""
        if worker.decision is None or worker.decision.done():
            worker.decision = asyncio.get_running_loop().create_task(self._decide(worker))
            self._probes[worker.decision] = None
            worker.decision.add_done_callback(self._probes.pop)
        return worker.decision

    async def _decide(self, worker: Worker) -> None:
        life, health, patience = worker.life, worker.health, self.policy.health.patience
        while life is not None and worker.life is life and health.probed:
            asked = self.now()
            try:
                async with asyncio.timeout(patience):
                    version = await life.call(lambda engine: engine.health())
            except TimeoutError:
                # Where this very loop was held up, the answer may be waiting to be read.
                if self.now() - asked < patience + 1.0:
                    self._judge(worker, life, lambda: health.missed(self.now()), f"silent for {patience:g} s")
            except RolloutError as error:
                if not life.over:
                    self._judge(worker, life, lambda: health.refused(self.now()), str(error))
                    await asyncio.sleep(REFUSED_AGAIN)
            else:
                if version < life.version:
                    life.distrusted = True
                    self.lose(life, f"it has weights of version {version}, and had {life.version}")
                    return
                self._judge(worker, life, health.answered, "")
                return

    async def collect(self, life: Life) -> None:
        """Learn how far `life` has come with its answers, if it says so in time."""
        with suppress(RolloutError, TimeoutError):
            async with asyncio.timeout(self.policy.health.patience):
                await life.collect()

    def _judge(self, worker: Worker, life: Life, verdict: Callable[[], None], why: str) -> None:
        """Put a probe's outcome on `worker`'s record."""
        before = worker.health.state
        verdict()
        if worker.health.state is Health.DEAD:
            self._bury(worker, life, why)
        elif worker.health.state is not before:
            self.settle(worker)

    def lose(self, life: Life, why: str) -> None:
        """Give `life` up, for certain; nothing happens if it was already."""
        worker = self.workers.get(life.name)
        if worker is not None and worker.life is life:
            worker.health.lost(self.now())
            self._bury(worker, life, why)

    def _bury(self, worker: Worker, life: Life, why: str) -> None:
        worker.life, worker.why, self._served = None, why, None
        self._gone += life.generated
        answers = self.router.in_flight.get(life, 0)
        self.router.leave(life)
        life.end(why)
        if not worker.leaving:
            self.note(f"{worker.name} is given up ({why}); {answers} answers go to other workers")
        self.settle(worker)

    def join(self, worker: Worker, life: Life) -> None:
        """`life`, which has the newest weights now, serves as `worker` from here on."""
        worker.health.synced(self.now())
        self.note(f"{worker.name} serves, with version {life.version}")
        self.settle(worker)

    def settle(self, worker: Worker) -> None:
        """Have routing, view and waiters see the state that `worker` is in."""
        self._served = None
        if worker.life is not None:
            if worker.health.state is Health.HEALTHY and not worker.leaving:
                self.router.join(worker.life)
            else:
                self.router.hold_back(worker.life)
        self._show(worker)
        self.changed.notify()

    def _show(self, worker: Worker) -> None:
        """Tell the observer how `worker` is."""
        if self._observer is not None:
            self._observer.activity(worker.name, "leaving" if worker.leaving else worker.health.state.value)
            self._observer.count("fleet/healthy", self.gauges()["fleet/healthy"], self.now())

    def note(self, message: str) -> None:
        """A line for the user."""
        if self._observer is not None:
            self._observer.note(message)

    def activity(self, what: str) -> None:
        """What the workers as a whole do."""
        if self._observer is not None:
            self._observer.activity("workers", what)

    async def stop_probing(self) -> None:
        """End the probes under way."""
        for probe in list(self._probes):
            probe.cancel()
            with suppress(asyncio.CancelledError):
                await probe

    def now(self) -> float:
        """Seconds of the event loop's clock."""
        return asyncio.get_running_loop().time()
