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
from fleuve.control.journal import Admitted, Dropped, Ready, Record
from fleuve.control.past import Past
from fleuve.simulate.faults import MAX_FAILURES, Case
from fleuve.simulate.tries import FAILURES, Tries, ViolationError
from fleuve.types import Batch, Completion, Group, Prompt

REASONS = FAILURES | {"no signal", "overdue"}
"""Why a group may be dropped."""

LOSSES = 3
"""Workers that a group may lose."""

VOCABULARY = 1 << 24
"""There is no token from this on."""


def token(whose: int, version: int) -> int:
    """A token that says by which version it was sampled, and a number that says whose it is."""
    return whose * 1000 + version


def version_of(its: int) -> int:
    """The version that sampled it."""
    return its % 1000


def read_name(ids: Sequence[int]) -> str:
    """The text of an answer: what its first two tokens name, its group and its number."""
    return f"{ids[0] // 1000}/{ids[1] // 1000}"


def logprob_of(its: int) -> float:
    """Its log-probability, which is one that float32 has."""
    return -(its % 8) / 8


def name_of(request_id: str) -> str:
    """The request's name without what marks it as taken up by another worker."""
    return request_id.partition("~")[0]


def group_of(request_id: str) -> int:
    """The group that a request is of."""
    return int(request_id.partition("/")[0])


class Ledger:
    """One leg of a run: from the beginning, or from the `past` that an `earlier` leg left behind. Raises
    `ViolationError` as soon as something is wrong."""

    def __init__(
        self,
        case: Case,
        past: Past,
        earlier: Ledger | None = None,
        scored: Collection[str] = (),
        tries: Tries | None = None,
    ) -> None:
        """`scored`: the answers that had been, at the moment to which `past` leads; `tries`, what had become of
        groups."""
        self.case = case
        self.tries = tries or Tries()
        self.seen: Counter[str] = earlier.seen if earlier else Counter()
        """What went wrong, and what came of it, by kind."""
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
        self._truncated: dict[str, bool] = dict(earlier._truncated) if earlier else {}
        self.escaped_at: float | None = None
        """When a group last came through where one more that failed would have ended the run."""
        self._hurt: set[int] = set()
        self._killed: Counter[int] = Counter()  # group → workers
        self._began = asyncio.get_running_loop().time()
        self._admitted = {group: self._runs_again(group) for group in past.running}
        """Running group → when it was begun, and what was served then."""
        self._ready: dict[int, tuple[int, int]] = {}
        """Ready group → the trainer's version when it became so, and that of its oldest token."""
        self._there = frozenset() if self._whole_steps_only else frozenset(filter(self._to_be_used, scored))

    def resumes(self, gate: Gate) -> None:
        """The groups of an earlier life are there; those that are not ready, though they were, are sampled anew."""
        self._admitted |= dict.fromkeys(self._past.ready, (self._began, self.start))
        for group in gate.ids(State.READY):
            del self._admitted[group]
            self._ready[group] = self.start, self._past.ready[group].oldest_version
        for group, deadline in gate.deadlines(self._admitted).items() if self.case.overdue != "wait" else ():
            _, oldest = self._admitted[group]
            if deadline != oldest + self.case.eta:
                raise ViolationError(
                    f"group {group} has time until {deadline}, with tokens of {oldest} at η = {self.case.eta}"
                )

    def event(self, *what: object) -> None:
        """Something happened now."""
        self.events.append((round(asyncio.get_running_loop().time(), 6), *what))

    def digest(self) -> str:
        """The same for two runs in which the same things happened at the same times, in the same order."""
        return hashlib.blake2b(repr(self.events).encode(), digest_size=8).hexdigest()

    def saw(self, what: str) -> None:
        """One more of that kind."""
        self.seen[what] += 1

    @property
    def version(self) -> int:
        """The newest that was made."""
        return max(self.trained, default=self.start)

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
        oldest, newest = self._span(group)
        return newest <= self.start and (self.case.overdue != "wait" or oldest == self.start)

    def _span(self, group: int) -> tuple[int, int]:
        """The oldest and the newest version of the tokens that an earlier life has left of a group that runs again."""
        known = [int(v) for answer in self._past.answers.get(group, Answers()) for v in answer.versions]
        return min(known, default=self.start), max(known, default=self.start)

    def _runs_again(self, group: int) -> tuple[float, int]:
        """When the group was begun again, and the version that it counts from: of answers that cannot be used, that of
        now."""
        oldest, newest = self._span(group)
        return self._began, self.start if self._whole_steps_only or newest > self.start else oldest

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

    def answered(self, completion: Completion) -> None:
        """A worker has sampled this for a request."""
        request, versions = name_of(completion.request_id), completion.versions
        self.event("answered", request, len(versions), versions[0], versions[-1])
        self._truncated[request] = completion.finish_reason == "length"
        if request in self._there:
            raise ViolationError(f"answer {request} is there from before the resumption, and was sampled again")

    def scored(self, text: str, score: float | None) -> None:
        self.event("scored", text, score)
        if text in self._there:
            raise ViolationError(f"answer {text} has a verdict from before the resumption, and was scored again")
        self._scores[text] = score if score is not None and math.isfinite(score) else None

    def hurts(self, request_id: str) -> None:
        """Something goes wrong with an answer: its group may fail."""
        self._hurt.add(group_of(request_id))

    def kills(self, group: int) -> None:
        """A request of the group ends the worker that it came to."""
        self.saw("deadly request")
        self._killed[group] += 1
        if self._killed[group] > LOSSES:
            raise ViolationError(f"group {group} has ended {self._killed[group]} workers")

    def updated(self, worker: str, old: int, new: int) -> None:
        """A worker swaps its weights."""
        self.event("updated", worker, new)
        if new < old:
            raise ViolationError(f"{worker} went from version {old} back to {new}")

    def lost_trainer(self) -> None:
        """The trainer fails: nothing is known of the step that it was at."""
        self.event("trainer lost")
        self.saw("trainer lost")
        self.trainer_lost = True

    def wrote(self, record: Record) -> None:
        """The controller says what became of a group."""
        nearly = len(self.tries.failed) == MAX_FAILURES - 1
        self.tries.apply(record)
        if nearly and not self.tries.failed:
            self.escaped_at = asyncio.get_running_loop().time()
        match record:
            case Admitted(group=group, version=version):
                self._admitted[group] = asyncio.get_running_loop().time(), version
            case Ready(group=group, trajectories=trajectories):
                if self.case.dynamic_sampling and not self._has_signal(group):
                    raise ViolationError(f"group {group} has no signal, and is to be trained")
                self._admitted.pop(group, None)
                self._ready[group] = self.version, min(int(t.versions.min()) for t in trajectories)
            case Dropped(group=group, reason=reason):
                self.saw(f"dropped: {reason}")
                self._check_drop(group, reason)
                self._admitted.pop(group, None)
                self._ready.pop(group, None)
            case _:
                pass

    def _check_drop(self, group: int, reason: str) -> None:
        """There is a reason for it in what the world knows."""
        case, samples = self.case, [f"{group}/{sample}" for sample in range(self.case.group_size)]
        match reason:
            case "timeout":
                since, _ = self._admitted[group]
                waited = asyncio.get_running_loop().time() - since
                justified = case.late_for_a_reason and waited > case.group_limit - 1e-6
            case "rollout failed":
                justified = group in self._hurt
            case "no verdict":
                justified = all(self._scores[sample] is None for sample in samples)
            case "truncated":
                justified = case.exclude_truncated and not self._compared(group)
            case "no signal":
                justified = case.dynamic_sampling and not self._has_signal(group)
            case "overdue":
                justified = case.overdue == "drop" and self._too_late(group)
            case _:
                justified = False
        if not justified:
            raise ViolationError(f"group {group} is dropped for no reason: {reason}")

    def _compared(self, group: int) -> list[float]:
        """The verdicts on those of its answers that count."""
        samples = [f"{group}/{sample}" for sample in range(self.case.group_size)]
        if self.case.exclude_truncated:
            samples = [sample for sample in samples if not self._truncated[sample]]
        return [score for sample in samples if (score := self._scores[sample]) is not None]

    def _has_signal(self, group: int) -> bool:
        return len(set(self._compared(group))) > 1

    def _too_late(self, group: int) -> bool:
        """Whether no step from here on can train it within η."""
        _, oldest = self._ready.get(group) or self._admitted[group]
        return oldest + self.case.eta < self.version

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
        self._check_left(set(ids), version)
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
            for group in trained:
                del self._ready[group.id]

    def _check_left(self, batch: set[int], version: int) -> None:
        """No ready group waits too long. When one becomes ready at version `v`, the groups that may go before it were
        admitted while `v` or an older version was served: so few slots were there that `η` steps are full of them."""
        waiting = {g: since for g, (since, _) in self._ready.items() if g not in batch}
        if starved := {g: since for g, since in waiting.items() if since + self.case.eta <= version}:
            raise ViolationError(
                f"groups (ready since version) {starved} are not in the step from {version} at η = {self.case.eta}"
            )
        if self.case.overdue == "drop" and (late := sorted(filter(self._too_late, self._admitted))):
            raise ViolationError(f"groups {late} run on, too late for the step from {version}")

    def _check_group(self, group: Group, version: int) -> None:
        if len(group.trajectories) != self.case.group_size:
            raise ViolationError(f"group {group.id} has {len(group.trajectories)} answers")
        for sample, t in enumerate(group.trajectories):
            request = f"{group.id}/{sample}"
            ids = t.output_ids.tolist()
            versions = [version_of(its) for its in ids]
            if (
                t.text != request
                or t.versions.tolist() != versions
                or t.logprobs.tolist() != list(map(logprob_of, ids))
            ):
                raise ViolationError(f"answer {request} is not what the worker sampled for it: {t}")
            if t.reward != self._scores[request]:
                raise ViolationError(f"the reward of {request} is {t.reward}, not {self._scores[request]}")
            if self.case.interrupt == "finish" and len(set(versions)) > 1:
                raise ViolationError(f"answer {request} has tokens of {set(versions)}, though updates let answers end")
            if len(versions) > self.case.max_new_tokens or max(versions) > version:
                raise ViolationError(f"answer {request} has {len(versions)} tokens, the last of {max(versions)}")
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
        if self.trainer_lost:
            return
        if gate.trained != self._trained_before + trained.total() or controller.version != self.version:
            raise ViolationError(
                f"the controller has trained {gate.trained} groups at version {controller.version}, the trainer "
                f"{self._trained_before + trained.total()} at {self.version}"
            )
        if held[State.STEPPING]:
            raise ViolationError(f"{held[State.STEPPING]} groups are in no step")
