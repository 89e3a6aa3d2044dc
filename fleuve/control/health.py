"""What the fleet knows of one rollout worker's health, and when a dead one may be started again.

             started            synced           missed, refused, doubt
    STARTING ────────▶ RESYNCING ──────▶ HEALTHY ──────────────────────▶ SUSPECT
       ▲                   │                     ◀──────────────────────    │
       │                   │                            answered            │ silent too long, refused again
       └─────────────── DEAD ◀──────────────────────────────────────────────┘
    start, after a back-off     lost (from anywhere)

A pure state machine without a clock: times are passed in, seconds on any clock that does not go back. A worker counts
for the served version while it is *living* (healthy or suspect: it may be sampling); it gets requests while healthy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Health(Enum):
    """The state of one worker."""

    STARTING = "starting"
    RESYNCING = "resyncing"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True)
class HealthPolicy:
    """Seconds, but for `misses` and `refusals`: so many probes in a row that were not answered within `patience`, or
    were refused, make a worker dead. (Counted, and not timed: a controller that was itself held up has asked once.)

    The first restart is at once; the next ones wait `first_delay`, then twice as long each, up to `longest_delay`.
    A worker that was healthy for `forgiven_after` begins afresh.
    """

    probe_every: float = 1.0
    patience: float = 2.5
    misses: int = 4
    refusals: int = 2
    first_delay: float = 1.0
    longest_delay: float = 60.0
    forgiven_after: float = 120.0

    def delay(self, deaths: int) -> float:
        """How long after the last of `deaths` in a row a start waits."""
        if deaths <= 1:
            return 0.0
        return min(self.first_delay * 2.0 ** min(deaths - 2, 64), self.longest_delay)


class HealthRecord:
    """One worker's state and what led to it.

    Every method that does not fit the state raises RuntimeError, except for the news that come late: an answer, a miss,
    a refusal or a doubt about a worker that is not there any more change nothing.
    """

    def __init__(self, policy: HealthPolicy, state: Health, now: float = 0.0) -> None:
        self.policy = policy
        self.state = state
        self.deaths = 0
        """In a row: without having been healthy for `forgiven_after` in between."""
        self._misses = 0
        self._refusals = 0
        self._healthy_since = now
        self._restart_at = now

    @property
    def living(self) -> bool:
        """It may be sampling."""
        return self.state in (Health.HEALTHY, Health.SUSPECT)

    @property
    def probed(self) -> bool:
        """There is something to ask: it is living, or about to be."""
        return self.living or self.state is Health.RESYNCING

    @property
    def restart_at(self) -> float:
        """When a dead worker may be started."""
        return self._restart_at

    # --- what probes and requests say -------------------------------------------------------------------------------

    def answered(self) -> None:
        """A probe was answered in time."""
        self._misses = self._refusals = 0
        if self.living:
            self.state = Health.HEALTHY

    def missed(self, now: float) -> None:
        """A probe was not answered within `patience`."""
        if self.probed:
            self._suspect()
            self._misses += 1
            if self._misses >= self.policy.misses:
                self.lost(now)

    def refused(self, now: float) -> None:
        """A probe was answered with an error, or nobody was there to answer it."""
        if self.probed:
            self._suspect()
            self._refusals += 1
            if self._refusals >= self.policy.refusals:
                self.lost(now)

    def doubt(self) -> None:
        """A request failed there: the next probe decides."""
        self._suspect()

    def _suspect(self) -> None:
        if self.state is Health.HEALTHY:
            self.state = Health.SUSPECT

    def lost(self, now: float) -> None:
        """It is given up for certain: it failed an update, did not start, or lost its weights."""
        if self.state is Health.DEAD:
            raise RuntimeError("it is dead already")
        if self.living and now - self._healthy_since >= self.policy.forgiven_after:
            self.deaths = 0
        self.deaths += 1
        self.state, self._misses, self._refusals = Health.DEAD, 0, 0
        self._restart_at = now + self.policy.delay(self.deaths)

    # --- coming back ------------------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Dead → starting."""
        self._move(Health.DEAD, Health.STARTING)
        if now < self._restart_at:
            self.state = Health.DEAD
            raise RuntimeError(f"it may be started {self._restart_at - now:g} s later")

    def started(self) -> None:
        """Starting → resyncing: it answers, with weights that may be old."""
        self._move(Health.STARTING, Health.RESYNCING)

    def synced(self, now: float) -> None:
        """Resyncing → healthy: it has the current weights."""
        self._move(Health.RESYNCING, Health.HEALTHY)
        self._healthy_since = now

    def _move(self, old: Health, new: Health) -> None:
        if self.state is not old:
            raise RuntimeError(f"it is {self.state.value}, not {old.value}")
        self.state = new
