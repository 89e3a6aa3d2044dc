"""What one seed of the schedule fuzzer draws: a small run's settings, its latencies, and what goes wrong when.

Everything is a function of the seed. Each kind of fault is switched on by itself in some of the seeds ("swarm testing",
Groce et al., ISSTA 2012): a world in which everything fails all the time never gets to the interesting states.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass

from fleuve.config.settings import Settings

TICK = 0.01
"""Seconds in which latencies are counted in half of the worlds, so that many things happen at the same moment."""


@dataclass(frozen=True)
class WorkerFault:
    """Worker `worker` breaks at time `at` [s] for `seconds`: it `hang`s (stands still and says nothing), is `away` (the
    connection is lost, and with it what it was generating), `dies` (away until it is started again), or is `reborn`
    (somebody else has started it again at once: it answers, with the weights that the run began with)."""

    worker: int
    kind: str
    at: float
    seconds: float


@dataclass(frozen=True)
class Change:
    """At time `at` [s] a worker joins (`add`), or one leaves: when its answers have ended (`remove`), or `at once`."""

    kind: str
    at: float


@dataclass(frozen=True)
class Rates:
    """Probabilities, each per event of its kind.

    Answers: `lost` (no reply, ever), `refused` (an error), `aborted` (by the worker), `slow` (20 times as long),
    `mixed_up` (the reply to an earlier request instead), `false` (a reply that cannot be, see `lies.py`),
    `false_progress` (the same while it is being sampled), `cut_off` (the worker dies once the answer is whole, and
    before it is handed in), `deadly` (of a request that ends whichever worker gets it). Verdicts: `no_verdict`, `nan`,
    `late` (seconds), `silent` (no reply, ever). Trainer: `slow_step`. A worker that is to be started: `no_start`.
    """

    lost: float = 0.0
    refused: float = 0.0
    aborted: float = 0.0
    slow: float = 0.0
    mixed_up: float = 0.0
    false: float = 0.0
    false_progress: float = 0.0
    cut_off: float = 0.0
    deadly: float = 0.0
    no_verdict: float = 0.0
    nan: float = 0.0
    late: float = 0.0
    silent: float = 0.0
    slow_step: float = 0.0
    no_start: float = 0.0


@dataclass(frozen=True)
class Case:
    """One schedule. Times are virtual seconds, `*_seconds` are means of what is drawn again at each event."""

    seed: int
    steps: int
    batch_size: int
    eta: int
    overdue: str
    interrupt: str
    placement: str
    workers: int
    continues: bool  # whether workers go on with answers that others have begun
    supervised: bool  # whether somebody can start workers again
    group_size: int
    max_new_tokens: int
    dynamic_sampling: bool
    tie_rate: float
    exclude_truncated: bool
    evaluate_every: int
    checkpoint_every: int
    ticks: bool
    token_seconds: float
    tail: float
    train_seconds: float
    publish_seconds: float
    update_seconds: float
    reward_seconds: float
    group_timeout: float
    request_timeout: float
    update_timeout: float
    step_timeout: float
    no_worker_timeout: float
    start_seconds: float
    rates: Rates
    worker_faults: tuple[WorkerFault, ...]
    changes: tuple[Change, ...]
    failing_update: tuple[int, int] | None  # (worker, n-th update), which fails there and nowhere else
    failing_step: int | None
    failing_publish: int | None
    silent_step: int | None
    stop_at: float | None
    cut_after: float | None  # seconds after `stop_at`
    cancel_at: float | None
    resume: str  # "", "checkpoint" (a second leg from the last one), "journal" (and what was written down since)

    def settings(self) -> Settings:
        """The settings of a real run."""
        return Settings.model_validate(
            {
                "run_dir": "unused",
                "steps": self.steps,
                "seed": self.seed,
                "model": {"path": "unused"},
                "data": {"train": "unused"},
                "rollout": {
                    "group_size": self.group_size,
                    "workers": self.workers,
                    "max_new_tokens": self.max_new_tokens,
                    "interrupt": self.interrupt,
                    "request_timeout": self.request_timeout,
                    "update_timeout": self.update_timeout,
                },
                "control": {
                    "batch_size": self.batch_size,
                    "max_staleness": self.eta,
                    "overdue": self.overdue,
                    "group_timeout": self.group_timeout,
                    "max_failures_in_a_row": MAX_FAILURES,
                },
                "trainer": {"minibatches": 1, "step_timeout": self.step_timeout},
                "algorithm": {
                    "dynamic_sampling": self.dynamic_sampling,
                    "truncated": "exclude" if self.exclude_truncated else "keep",
                },
                "launch": {"placement": self.placement},
                "evaluate": {"every": self.evaluate_every},
                "checkpoint": {"every": self.checkpoint_every},
            }
        )

    @property
    def group_limit(self) -> float:
        """Seconds that a group has."""
        return self.group_timeout + (self.step_timeout if self.placement == "colocated" else 0.0)

    @property
    def longest_wait(self) -> float:
        """Seconds within which something must happen: everything that can be waited for, one after the other."""
        updates = 2 * (self.update_timeout + self.request_timeout)
        workers = self.no_worker_timeout + NOTICED_WITHIN
        return self.group_limit + self.step_timeout + updates + workers + EVALUATION_SECONDS + 10.0

    @property
    def late_for_a_reason(self) -> bool:
        """Whether anything can take so long that a group runs out of time."""
        rates = self.rates
        lasting = rates.lost, rates.slow, rates.cut_off, rates.false, rates.deadly, rates.silent, rates.late
        return any(lasting) or bool(self.worker_faults or self.failing_update)

    def describe(self) -> str:
        """One line a field, of the fields that say something."""
        fields = {**asdict(self), **{f"rates.{k}": v for k, v in asdict(self.rates).items()}}
        del fields["rates"]
        return "\n".join(f"  {k} = {v}" for k, v in fields.items() if v not in (None, "", 0.0, False, ()))


EVALUATION_SECONDS = 2.0

MAX_FAILURES = 12
"""Prompts in a row that may fail; the run ends with the last of them."""

NOTICED_WITHIN = 15.0
"""Seconds after which a worker that says nothing is given up (control.health.HealthPolicy)."""


def draw(seed: int) -> Case:
    """The case of that seed."""
    rng = random.Random(f"case {seed}")

    def some(chance: float, low: float, high: float) -> float:
        return rng.uniform(low, high) if rng.random() < chance else 0.0

    steps, workers, group_size = rng.randint(3, 8), rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 2, 4))
    train_seconds = rng.choice((0.0, 0.03, 0.1, 0.5))
    calm = rng.random() < 0.25
    patient = rng.random() < 0.4  # deadlines as those of real runs: it is probes that find out who hangs
    horizon = steps * max(0.3, train_seconds)
    share = 0.0 if calm else 0.25
    rates = Rates(
        lost=some(share, 0.01, 0.1),
        refused=some(share, 0.01, 0.2),
        aborted=some(share, 0.01, 0.1),
        slow=some(share, 0.02, 0.2),
        mixed_up=some(share, 0.01, 0.1),
        false=some(share, 0.005, 0.05),
        false_progress=some(share, 0.02, 0.3),
        cut_off=some(share * 0.8, 0.01, 0.1),
        deadly=some(share * 0.4, 0.005, 0.05),
        no_verdict=some(share, 0.02, 0.3),
        nan=some(share, 0.02, 0.2),
        late=some(share, 0.05, 0.3),
        silent=some(share, 0.01, 0.05),
        slow_step=some(share, 0.1, 0.4),
        no_start=some(share, 0.1, 0.7),
    )
    kinds = "hang", "away", "dies", "reborn", "reborn"
    faults = [
        WorkerFault(rng.randrange(workers), rng.choice(kinds), rng.uniform(0, horizon), seconds)
        for seconds in rng.choices((0.05, 0.5, 3.0, 8.0, 30.0), k=rng.choice((0, 0, 1, 2, 4)))
        if not calm
    ]
    if patient and not calm and rng.random() < 0.4:
        faults = [WorkerFault(rng.randrange(workers), "hang", rng.uniform(0, horizon / 2), 30.0)]
    ending = "" if calm else rng.choice(("", "", "", "stop", "cut", "cancel", "update", "step", "publish", "silent"))
    stops = ending in ("stop", "cut")
    supervised = rng.random() < 0.8
    moments = [rng.uniform(0, horizon), *(fault.at + rng.uniform(0, 0.3) for fault in faults)]
    changes = [
        Change(kind, rng.choice(moments) + rng.uniform(0, 0.1))
        for kind in rng.choices(("add", "remove", "at once", "at once"), k=rng.choice((1, 3, 6)))
        if supervised
    ]
    if rng.random() < 0.65:
        changes = []
    cancel_at = rng.uniform(0, horizon)
    if changes and ending == "cancel" and rng.random() < 0.7:
        # One leaves because it died, and all is over before that is settled.
        at = rng.uniform(0, horizon / 2)
        faults = [WorkerFault(rng.randrange(workers), "dies", at, 0.0)]
        changes, cancel_at = [Change("at once", at + rng.uniform(0, 0.15))], at + rng.uniform(0.15, 0.2)
    dynamic_sampling = group_size > 1 and rng.random() < 0.2
    return Case(
        seed=seed,
        steps=steps,
        batch_size=rng.choice((1, 2, 3, 4)),
        eta=rng.choice((0, 0, 1, 1, 2, 3, 6)),
        overdue=rng.choice(("wait", "wait", "wait", "mask", "train", "drop", "drop")),
        interrupt=rng.choice(("recompute", "recompute", "keep", "finish")),
        placement=rng.choice(("disaggregated", "disaggregated", "colocated")),
        workers=workers,
        continues=rng.random() < 0.6,
        supervised=supervised,
        group_size=group_size,
        max_new_tokens=rng.choice((6, 8, 60, 100)),
        dynamic_sampling=dynamic_sampling,
        tie_rate=rng.choice((0.0, 0.2, 0.3, 0.5, 0.6, 1.0 if dynamic_sampling else 0.5)),
        exclude_truncated=rng.random() < 0.2,
        evaluate_every=rng.choice((0, 0, 0, 1, 3)),
        checkpoint_every=rng.choice((0, 1, 2)),
        ticks=rng.random() < 0.5,
        token_seconds=rng.choice((0.0, TICK, TICK, 2 * TICK)),
        tail=some(0.7, 0.02, 0.3),
        train_seconds=train_seconds,
        publish_seconds=rng.choice((0.0, TICK, 0.05)),
        update_seconds=rng.choice((0.0, TICK, 0.05, 0.3)),
        reward_seconds=rng.choice((0.0, 0.0, TICK, 0.1)),
        group_timeout=60.0 if patient else rng.choice((4.0, 8.0)),
        request_timeout=30.0 if patient else rng.choice((2.0, 6.0)),
        update_timeout=120.0 if patient else rng.choice((1.0, 5.0)),
        step_timeout=rng.choice((4.0, 10.0)),
        no_worker_timeout=rng.choice((3.0, 20.0)),
        start_seconds=rng.choice((0.0, 0.1, 2.0)),
        rates=rates,
        worker_faults=tuple(faults),
        changes=tuple(sorted(changes, key=lambda change: change.at)),
        failing_update=(rng.randrange(workers), rng.randint(0, 3)) if ending == "update" else None,
        failing_step=rng.randrange(steps) if ending == "step" else None,
        failing_publish=rng.randrange(steps) if ending == "publish" else None,
        silent_step=rng.randrange(steps) if ending == "silent" else None,
        stop_at=rng.uniform(0, horizon) if stops else None,
        cut_after=rng.uniform(0, 0.5) if ending == "cut" else None,
        cancel_at=cancel_at if ending == "cancel" else None,
        resume=rng.choice(("", "checkpoint", "journal", "journal")) if ending or faults else "",
    )


class Chance:
    """Latencies and coincidences of one part of the world."""

    def __init__(self, case: Case, part: str) -> None:
        self._rng = random.Random(f"{part} {case.seed}")
        self._ticks = case.ticks

    def seconds(self, mean: float) -> float:
        """Around `mean`, in ticks where the world counts in ticks: then many things happen at the same moment."""
        seconds = mean * self._rng.uniform(0.5, 1.5)
        return round(seconds / TICK) * TICK if self._ticks else seconds

    def happens(self, rate: float) -> bool:
        return rate > 0.0 and self._rng.random() < rate

    def length(self, tail: float) -> int:
        """Tokens of an answer; at least the two that name it."""
        return self._rng.randint(2, 8) * (10 if self.happens(tail) else 1)

    def pick(self, n: int) -> int:
        return self._rng.randrange(n)

    async def turns(self) -> None:
        """Let others go first, some of the time."""
        for _ in range(max(0, self._rng.randint(-3, 2))):
            await asyncio.sleep(0)
