"""What a seed means: the settings of a run, and what happens to which of its processes when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["rollout worker", "trainer", "controller", "reward worker", "nursery", "sandbox server"]
Action = Literal["kill", "stop", "pause"]

KINDS: tuple[Kind, ...] = (
    "rollout worker",
    "trainer",
    "controller",
    "reward worker",
    "nursery",
    "sandbox server",
)

PROMPTS = 16
BATCH = 4
STEPS = 2 * PROMPTS // BATCH
"""Two passes over the data: every prompt is trained twice."""

SHARDED = 0.15
"""The share of seeds whose trainer has two ranks."""


@dataclass(frozen=True)
class Fault:
    """`kill`: SIGKILL. `pause`: SIGSTOP, and SIGCONT after `pause` seconds. `stop`: SIGSTOP for good; the run has to
    notice. Nobody watches over the controller: it is killed after `pause` seconds then.

    It happens `delay` seconds after the run has reported `step` (0: admitted a group), or (None) after the command was
    last started; and after the fault before it.
    """

    kind: Kind
    action: Action
    step: int | None
    delay: float
    pause: float
    pick: float
    """Which of several processes: a share of their number."""

    def describe(self) -> str:
        when = "start" if self.step is None else f"step {self.step}"
        how = {"kill": "kill -9", "stop": "SIGSTOP", "pause": f"SIGSTOP for {self.pause:.2f} s"}[self.action]
        if self.kind == "controller" and self.action == "stop":
            how = f"SIGSTOP, after {self.pause:.2f} s kill -9"
        return f"{self.delay:.2f} s after {when}: {how} of a {self.kind}"


@dataclass(frozen=True)
class Plan:
    """One run. `exact`: synchronous with a single worker, which nothing happens to: it comes to the same weights as a
    run that nothing happens to at all, to the last bit. Of several `ranks` of the trainer, a fault hits one."""

    seed: int
    verifier: Literal["math", "code"]
    exact: bool
    staleness: int
    workers: int
    checkpoint_every: int
    interrupt: Literal["recompute", "keep", "finish"]
    faults: tuple[Fault, ...]
    ranks: int = 1

    def flags(self) -> list[str]:
        """Of the command line, beside the config."""
        return [
            *("--control.max_staleness", str(self.staleness)),
            *("--rollout.workers", str(self.workers)),
            *("--checkpoint.every", str(self.checkpoint_every)),
            *("--rollout.interrupt", self.interrupt),
            *(("--rollout.health_timeout", "60") if self.exact else ()),
            *(("--trainer.ranks", str(self.ranks)) if self.ranks > 1 else ()),
        ]

    @property
    def run_seed(self) -> int:
        """Exact runs are all the same but for their misfortunes."""
        return 1 if self.exact else self.seed

    def describe(self) -> str:
        shape = f"{self.verifier}, {' '.join(self.flags())}{', exact' if self.exact else ''}"
        return "\n".join([f"seed {self.seed}: {shape}", *(f"  {fault.describe()}" for fault in self.faults)])


def draw(seed: int) -> Plan:
    """The same plan for the same seed. Each kind is hit first by every sixth seed, and by others besides; where the
    trainer has two ranks, one of them is hit for sure."""
    rng = random.Random(seed)
    first = KINDS[seed % len(KINDS)]
    exact = first in ("trainer", "controller", "reward worker") and rng.random() < 0.25
    code = first == "sandbox server" or (not exact and rng.random() < 0.15)
    kinds = [kind for kind in KINDS if (code or kind != "sandbox server") and not (exact and kind == "rollout worker")]
    more = rng.choices(kinds, k=rng.randint(2, 4))
    faults = []
    for fault in sorted((_fault(rng, kind) for kind in (first, *more)), key=_order):
        faults.append(fault)
        if fault.kind == "controller" and fault.action != "pause" and rng.random() < 0.4:
            faults.append(_fault(rng, rng.choice(kinds), starting=True))  # while it is on its way back
    of_ranks = random.Random(f"ranks of {seed}")  # by itself: seeds without several ranks are what they were
    sharded = of_ranks.random() < SHARDED
    if sharded:
        faults = sorted([*faults, _fault(of_ranks, "trainer")], key=_order)
    return Plan(
        seed=seed,
        verifier="code" if code else "math",
        exact=exact,
        staleness=0 if exact else rng.choice([0, 1, 2, 2, 4]),
        workers=1 if exact else rng.choice([1, 2, 2]),
        checkpoint_every=rng.choice([0, 1, 2, 3]),
        interrupt="recompute" if exact else rng.choice(["recompute", "recompute", "keep", "finish"]),
        faults=tuple(faults),
        ranks=2 if sharded else 1,
    )


def _fault(rng: random.Random, kind: Kind, starting: bool | None = None) -> Fault:
    if starting is None:
        starting = rng.random() < 0.15
    return Fault(
        kind=kind,
        action=rng.choices(("kill", "stop", "pause"), (5, 2, 2))[0],
        step=None if starting else rng.randrange(STEPS + 1),
        delay=rng.uniform(0.0, 8.0) if starting else rng.uniform(0.0, 0.4),
        pause=rng.uniform(0.1, 4.0),
        pick=rng.random(),
    )


def _order(fault: Fault) -> tuple[int, float]:
    return (-1, fault.delay) if fault.step is None else (fault.step, 0.0)
