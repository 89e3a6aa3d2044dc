"""The gate admits groups so that staleness stays within η, and keeps the ledger of what became of each of them.

There are `(max_staleness + 1) × batch_size` slots. A group holds one from its admission until it is dropped, or until
the weights that a step made of it are served by every rollout worker. With `s` the served version this is the bound of
the AReaL paper (arXiv 2505.24298, section 5.1), `floor((N − 1) / B) ≤ s + η`, where N counts admitted groups less
dropped ones: a group admitted while `s` is served samples no token older than `s`, and there is room to train it by the
step that starts from version `s + η`, its deadline.

A pure state machine: no clock, no tasks. A group goes running → ready → stepping → trained, or is dropped on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import Enum

from fleuve.control.schedule import Schedule


class State(Enum):
    """Where an admitted group is. `TRAINED` groups still hold their slot until their weights are served."""

    RUNNING = "running"
    READY = "ready"
    STEPPING = "stepping"


class Gate:
    """Slots and ledger. Every method leaves `admitted = running + ready + stepping + trained + dropped`."""

    def __init__(self, batch_size: int, max_staleness: int, version: int = 0) -> None:
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.slots = (max_staleness + 1) * batch_size
        self.served_version = version
        self.admitted = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self._states: dict[int, State] = {}
        self._counts: Counter[State] = Counter()
        self._deadlines: dict[int, int] = {}
        self._schedule = Schedule()
        self._awaiting_service: list[tuple[int, int]] = []  # (version made, slots held until it is served)

    def resume(self, admitted: int, trained: int, dropped: Mapping[str, int], live: Mapping[int, int]) -> None:
        """Take over the ledger of the run that this one continues. `live`: the groups neither trained nor dropped, all
        running, in order of admission, each with the version that none of its tokens is older than."""
        self.admitted, self.trained, self.dropped = admitted, trained, Counter(dropped)
        for group, version in live.items():
            self._start(group, version + self.max_staleness)
        self._check()

    @property
    def free(self) -> int:
        """Groups that may be admitted now."""
        return self.slots - len(self._states) - sum(held for _, held in self._awaiting_service)

    def count(self, state: State) -> int:
        """Groups in `state`."""
        return self._counts[state]

    def ids(self, state: State) -> list[int]:
        """Ids of the groups in `state`, in order of admission."""
        return [i for i, s in self._states.items() if s is state]

    def deadlines(self, ids: Iterable[int]) -> dict[int, int]:
        """The last version from which a step may start that trains each group within η."""
        return {i: self._deadlines[i] for i in ids}

    def next_batch(self, version: int, *, wait: bool) -> list[int] | None:
        """The ready groups of the step that starts from `version`, or None while it must wait: see `batching`."""
        return self._schedule.next_batch(version, self.batch_size, wait=wait)

    def overdue(self, version: int, ids: Iterable[int]) -> list[int]:
        """Of these running and ready groups, those that no step from `version` on can train within η."""
        if not self._schedule.any_overdue(version):
            return []
        return [i for i in ids if self._deadlines[i] < version]

    def admit(self) -> int:
        """A new running group's id.

        Raises:
            RuntimeError: no slot is free.
        """
        if self.free <= 0:
            raise RuntimeError(f"no slot is free: {self.slots} slots, served version {self.served_version}")
        group = self.admitted
        self.admitted += 1
        self._start(group, self.served_version + self.max_staleness)
        return group

    def _start(self, group: int, deadline: int) -> None:
        self._states[group] = State.RUNNING
        self._counts[State.RUNNING] += 1
        self._deadlines[group] = deadline
        self._schedule.run(deadline)

    def finish(self, group: int, oldest_version: int) -> None:
        """Running → ready. The oldest token is known now, so the deadline is exact."""
        self._move([group], State.RUNNING, State.READY)
        self._schedule.end_run(self._deadlines[group])
        self._deadlines[group] = max(self._deadlines[group], oldest_version + self.max_staleness)
        self._schedule.add_ready(group, self._deadlines[group])

    def begin_step(self, groups: Collection[int]) -> None:
        """Ready → stepping: these groups are the next training batch."""
        self._move(groups, State.READY, State.STEPPING)
        for group in groups:
            self._schedule.remove_ready(group, self._deadlines[group])

    def end_step(self, groups: Collection[int], version: int) -> None:
        """Stepping → trained: the step made `version`. Their slots come back once it is served."""
        self._move(groups, State.STEPPING, None)
        for group in groups:
            del self._deadlines[group]
        self.trained += len(groups)
        if version > self.served_version:
            self._awaiting_service.append((version, len(groups)))
        self._check()

    def put_back(self, groups: Collection[int]) -> None:
        """Stepping → ready: the step ended before it came to these groups."""
        self._move(groups, State.STEPPING, State.READY)
        for group in groups:
            self._schedule.add_ready(group, self._deadlines[group])

    def drop(self, group: int, reason: str) -> None:
        """The group will not be trained, for `reason`; its slot is free at once."""
        state = self._states.get(group)
        if state not in (State.RUNNING, State.READY):
            raise RuntimeError(f"group {group} is {state}: only running and ready ones can be dropped")
        deadline = self._deadlines.pop(group)
        if state is State.RUNNING:
            self._schedule.end_run(deadline)
        else:
            self._schedule.remove_ready(group, deadline)
        del self._states[group]
        self._counts[state] -= 1
        self.dropped[reason] += 1
        self._check()

    def serve(self, version: int) -> None:
        """Every rollout worker now samples with `version` or a newer one.

        Raises:
            RuntimeError: it goes back in time.
        """
        if version < self.served_version:
            raise RuntimeError(f"served version {version} is older than {self.served_version}")
        self.served_version = version
        self._awaiting_service = [(v, held) for v, held in self._awaiting_service if v > version]

    def _move(self, groups: Collection[int], old: State, new: State | None) -> None:
        wrong = {g: self._states.get(g) for g in groups if self._states.get(g) is not old}
        if wrong:
            raise RuntimeError(f"groups are not {old.value}: {wrong}")
        for group in groups:
            if new is None:
                del self._states[group]
            else:
                self._states[group] = new
        self._counts[old] -= len(groups)
        if new is not None:
            self._counts[new] += len(groups)

    def _check(self) -> None:
        accounted = len(self._states) + self.trained + self.dropped.total()
        if self.admitted != accounted:
            raise AssertionError(f"conservation: {self.admitted} groups admitted, {accounted} accounted for")
