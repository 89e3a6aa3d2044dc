"""What really happened in a fuzzed run, written down by the world and not by the controller, and held against the
design's invariants 1 (η is η), 2 (conservation), 7 (bounded waits) and 8 (no verdict is not a zero).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Collection, Sequence

from fleuve.control.answers import Answers
from fleuve.control.controller import Controller
from fleuve.control.gate import Gate, State
from fleuve.control.past import Past
from fleuve.simulate.faults import Case
from fleuve.types import Batch, Group, Prompt

REASONS = frozenset({"timeout", "rollout failed", "no verdict", "truncated", "no signal", "overdue"})
"""Why a group may be dropped."""


def token(whose: int, version: int) -> int:
    """A token that says by which version it was sampled, and a number that says whose it is."""
    return whose * 1000 + version


def version_of(its: int) -> int:
    """The version that sampled it."""
    return its % 1000


def read_name(ids: Sequence[int]) -> str:
    """The text of an answer: what its first two tokens name, its group and its number."""
    return f"{ids[0] // 1000}/{ids[1] // 1000}"


class ViolationError(AssertionError):
    """The controller broke a promise."""


class Ledger:
    """One leg of a run: from the beginning, or from the `past` that an `earlier` leg left behind. Raises
    `ViolationError` as soon as something is wrong."""

    def __init__(self, case: Case, past: Past, earlier: Ledger | None = None, scored: Collection[str] = ()) -> None:
        """`scored`: the answers that had been, at the moment to which `past` leads."""
        self.case = case
        self.start = past.version
        self.events: list[tuple[object, ...]] = earlier.events if earlier else []
        live = [*past.running.values(), *(group.prompt for group in past.ready.values())]
        self.issued = Counter(prompt.id for prompt in live)
        self.returned: Counter[str] = Counter()
        self.trained: dict[int, list[str]] = {}  # version made → prompts
        self.trainer_lost = False
        self.cut = False
        self._past = past
        self._admitted_before = past.admitted - len(live)
        self._dropped_before = past.dropped.total()
        self._trained_before = past.trained
        self._whole_steps_only = case.settings().reproducible
        self._stepping: int | None = None
        self._trained_groups: set[int] = set()
        self._scores: dict[str, float | None] = dict(earlier._scores) if earlier else {}
        self._there = frozenset() if self._whole_steps_only else frozenset(filter(self._to_be_used, scored))

    def event(self, *what: object) -> None:
        """Something happened now."""
        self.events.append((round(asyncio.get_running_loop().time(), 6), *what))

    def digest(self) -> str:
        """The same for two runs in which the same things happened at the same times, in the same order."""
        return hashlib.blake2b(repr(self.events).encode(), digest_size=8).hexdigest()

    @property
    def have_scores(self) -> frozenset[str]:
        """The answers that have been scored by now."""
        return frozenset(self._scores)

    def _to_be_used(self, request: str) -> bool:
        """Whether the answer, of before the resumption, must be taken as it is: its group was running, and can be
        trained within η still, wherever it stands in the order."""
        group = int(request.split("/")[0])
        if group not in self._past.running:
            return False
        known = self._past.answers.get(group, Answers())
        oldest, newest = known.oldest_version, known.newest_version
        if oldest is None or newest is None:
            return True
        return newest <= self.start and (self.case.overdue != "wait" or oldest == self.start)

    # --- what the world does ----------------------------------------------------------------------------------------

    def issues(self, prompt: Prompt, gate: Gate, served: int) -> None:
        """A prompt is being admitted while every worker samples with `served` or newer: a slot must be free. It is
        when it was given back, or when what was trained under it is served."""
        self.event("issued", prompt.id)
        dropped = gate.dropped.total() - self._dropped_before
        served_groups = sum(len(groups) for made, groups in self.trained.items() if made <= served)
        held = self.issued.total() - dropped - served_groups
        if held >= (self.case.eta + 1) * self.case.batch_size:
            raise ViolationError(f"{held + 1} groups are admitted at η = {self.case.eta} while {served} is served")
        self.issued[prompt.id] += 1

    def gives_back(self, prompt: Prompt) -> None:
        self.event("returned", prompt.id)
        self.returned[prompt.id] += 1

    def answered(self, request: str, versions: list[int]) -> None:
        """A worker has sampled these versions' tokens for a request."""
        self.event("answered", request, len(versions), versions[0], versions[-1])
        if request in self._there:
            raise ViolationError(f"answer {request} is there from before the resumption, and was sampled again")

    def scored(self, text: str, score: float | None) -> None:
        self.event("scored", text, score)
        if text in self._there:
            raise ViolationError(f"answer {text} has a verdict from before the resumption, and was scored again")
        self._scores[text] = score if score is not None and math.isfinite(score) else None

    def updated(self, worker: str, old: int, new: int) -> None:
        """A worker swaps its weights."""
        self.event("updated", worker, new)
        if new < old:
            raise ViolationError(f"{worker} went from version {old} back to {new}")

    def lost_trainer(self) -> None:
        """The trainer fails: nothing is known of the step that it was at."""
        self.event("trainer lost")
        self.trainer_lost = True

    def step_begins(self, batch: Batch, version: int, workers_stand: bool) -> None:
        """The trainer gets a batch."""
        self.event("step", version, tuple(g.id for g in batch.groups))
        case, ids = self.case, [g.id for g in batch.groups]
        if self._stepping is not None:
            raise ViolationError("a step begins before the last has ended")
        if batch.version != version:
            raise ViolationError(f"a batch for version {batch.version} comes to a trainer at {version}")
        if len(ids) != case.batch_size or len(set(ids)) != len(ids):
            raise ViolationError(f"a batch of {case.batch_size} groups is {ids}")
        if twice := self._trained_groups & set(ids):
            raise ViolationError(f"groups {sorted(twice)} are trained again")
        if case.placement == "colocated" and not workers_stand:
            raise ViolationError("the trainer steps while workers generate on its devices")
        for group in batch.groups:
            self._check_group(group, version)
        self._stepping = version

    def step_ends(self, trained: list[Group], version: int) -> None:
        """These groups are in the weights of `version`."""
        self.event("stepped", version, tuple(g.id for g in trained))
        self._stepping = None
        if self._whole_steps_only and 0 < len(trained) < self.case.batch_size:
            self.cut = True
        elif trained:
            self._trained_groups |= {g.id for g in trained}
            self.trained[version] = [g.prompt.id for g in trained]

    def _check_group(self, group: Group, version: int) -> None:
        if len(group.trajectories) != self.case.group_size:
            raise ViolationError(f"group {group.id} has {len(group.trajectories)} answers")
        for sample, t in enumerate(group.trajectories):
            request = f"{group.id}/{sample}"
            versions = [version_of(its) for its in t.output_ids.tolist()]
            if t.text != request or t.versions.tolist() != versions:
                raise ViolationError(f"answer {request} is not what the worker sampled for it: {t}")
            if t.reward != self._scores[request]:
                raise ViolationError(f"the reward of {request} is {t.reward}, not {self._scores[request]}")
            if self.case.interrupt == "finish" and len(set(versions)) > 1:
                raise ViolationError(f"answer {request} has tokens of {set(versions)}, though updates let answers end")
            staleness = version - min(versions)
            if self.case.overdue in ("wait", "drop") and staleness > self.case.eta:
                raise ViolationError(
                    f"a token of staleness {staleness} is trained at η = {self.case.eta} ({self.case.overdue})"
                )

    def given_up(self, pending: Sequence[Prompt]) -> set[str]:
        """Prompts that were admitted, and will be neither trained nor served again."""
        trained = Counter(prompt for prompts in self.trained.values() for prompt in prompts)
        return set(self.issued - self.returned - trained - Counter(prompt.id for prompt in pending))

    # --- the end ----------------------------------------------------------------------------------------------------

    def check_end(self, controller: Controller) -> None:
        """Every admitted group was trained once, or dropped for a reason, or is pending."""
        gate = controller.gate
        held = {state: gate.count(state) for state in State}
        trained = Counter(prompt for prompts in self.trained.values() for prompt in prompts)
        if gate.admitted != self._admitted_before + self.issued.total():
            raise ViolationError(f"{gate.admitted} groups admitted of {self.issued.total()} prompts")
        if gate.admitted != sum(held.values()) + gate.trained + gate.dropped.total():
            raise ViolationError(f"conservation: {gate.admitted} ≠ {held} + {gate.trained} + {gate.dropped}")
        if strange := set(gate.dropped) - REASONS:
            raise ViolationError(f"dropped for {strange}")
        pending = Counter(prompt.id for prompt in controller.pending())
        if max(pending.values(), default=1) > 1:
            raise ViolationError(f"prompts are pending twice: {pending}")
        if pending.total() != sum(held.values()):
            raise ViolationError(f"{pending.total()} prompts are pending, of {held}")
        given_up = self.issued - self.returned - pending - trained
        owed = trained + pending + self.returned - self.issued
        if owed:
            raise ViolationError(f"prompts came twice of one: {dict(owed)}")
        dropped_for_good = gate.dropped.total() - self._dropped_before - self.returned.total()
        if given_up.total() != dropped_for_good:
            raise ViolationError(f"prompts vanished: {dict(given_up)}, though {dropped_for_good} were given up")
        before = self._past.failures.attempts
        once = [prompt for prompt in given_up if self.issued[prompt] + before.get(prompt, 0) == 1]
        if len(once) > gate.dropped["no signal"] - self._past.dropped["no signal"]:
            raise ViolationError(f"prompts were given up at the first failure: {once}")
        if self.trainer_lost:
            return
        if gate.trained != self._trained_before + trained.total() or controller.version != max(
            self.trained, default=self.start
        ):
            raise ViolationError(
                f"the controller has trained {gate.trained} groups at version {controller.version}, the trainer "
                f"{self._trained_before + trained.total()} at {max(self.trained, default=self.start)}"
            )
        if held[State.STEPPING]:
            raise ViolationError(f"{held[State.STEPPING]} groups are in no step")
