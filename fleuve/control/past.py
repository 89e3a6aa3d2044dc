"""What a run had come to: its ledger and its groups, from a checkpoint's state and the journal's records since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from fleuve.contracts import PromptSource
from fleuve.control.answers import Answers
from fleuve.control.failures import REASONS, Failures
from fleuve.control.gate import Gate
from fleuve.control.gate import State as GroupState
from fleuve.control.journal import Admitted, Answer, Dropped, Evaluated, Judged, Ready, Record, State, Step, ready
from fleuve.errors import UserError
from fleuve.types import Batch, Group, Prompt


class Past:
    """Apply records in order; a controller continues from what they come to.

    `running` and `ready` hold the groups alive by id, in order of admission, `answers` what there is of those that run.
    With a source its cursor is moved along; without one only the groups are followed, which is all that a trainer's
    steps need to be made again.
    """

    def __init__(self, source: PromptSource | None = None) -> None:
        self.version = 0
        self.admitted = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.evaluated: int | None = None
        self.running: dict[int, Prompt] = {}
        self.ready: dict[int, Group] = {}
        self.answers: dict[int, Answers] = {}
        self.failures = Failures()
        self.without_signal = 0
        """Groups in a row that dynamic sampling replaced."""
        self._source = source
        self._restored_below = 0  # groups below this were admitted before the state that this began with

    def apply(self, record: Record) -> Batch | None:
        """Move on by one record; the batch, if it was a step that was made whole.

        A step that was cut short is not made: its groups stay ready. It counts only where a checkpoint holds it.

        Raises:
            UserError: the source serves another prompt than it did then.
        """
        match record:
            case State():
                self._restore(record)
            case Admitted(group=group, prompt=prompt):
                self._admit(group, prompt)
            case Answer(group=group) | Judged(group=group):
                if group in self.running:  # one that was dropped may have been about to hear of it
                    self.answers.setdefault(group, Answers()).apply(record)
            case Ready(group=group, trajectories=trajectories, admitted_version=version):
                prompt = self._leaves(group)
                self.failures.succeeded(prompt.id)
                self.without_signal = 0
                self.ready[group] = Group(id=group, prompt=prompt, trajectories=trajectories, admitted_version=version)
            case Dropped(group=group, reason=reason, again=again):
                self._drop(group, reason, again)
            case Step() if record.whole:
                return self._step(record)
            case Evaluated(version=version):
                self.evaluated = version
            case _:
                pass
        return None

    def _restore(self, state: State) -> None:
        self.version, self.admitted, self.trained = state.version, state.admitted, state.trained
        self.dropped = Counter(state.dropped)
        self.evaluated = state.evaluated
        self.running, self.ready, self.answers = {}, {}, {}
        self.failures = Failures(state.attempts)
        self.without_signal = state.without_signal
        self._restored_below = state.admitted
        if self._source is not None:
            self._source.restore(state.source)

    def _admit(self, group: int, prompt: Prompt) -> None:
        self.running[group] = prompt
        if group < self._restored_below:
            return  # of the state: its cursor and its count are past it
        self.admitted = group + 1
        if self._source is not None and (served := self._source.next()).id != prompt.id:
            raise UserError(
                f"the journal says that group {group} was prompt {prompt.id}, and the data serves {served.id} now: "
                "the data has changed since; restore it, or start anew with --resume no"
            )

    def _drop(self, group: int, reason: str, again: bool) -> None:
        prompt = self._leaves(group)
        self.dropped[reason] += 1
        if reason in REASONS:
            self.failures.failed(prompt.id)
        elif reason == "no signal":
            self.failures.succeeded(prompt.id)
            self.without_signal += 1
        if again and self._source is not None:
            self._source.give_back(prompt)

    def _leaves(self, group: int) -> Prompt:
        """The prompt of a group, which is neither running nor ready any more."""
        self.answers.pop(group, None)
        return self.ready.pop(group).prompt if group in self.ready else self.running.pop(group)

    def _step(self, step: Step) -> Batch:
        batch = Batch(version=step.version - 1, groups=[self.ready.pop(group) for group in step.groups])
        self.version = step.version
        self.trained += len(step.trained)
        return batch


def whole_waves(records: Iterable[Record], running: Collection[int] = ()) -> Iterator[Record]:
    """Of a journal's `records` those up to the end of the last whole wave: the groups of a wave are sampled together,
    or their answers are not the same to the last bit. `running` are the groups that ran before; if there are any, all
    are kept."""
    if running:
        yield from records
        return
    alive: set[int] = set()
    wave: list[Record] = []
    for record in records:
        if isinstance(record, Admitted):
            if not alive:
                yield from wave
                wave = []
            alive.add(record.group)
        elif isinstance(record, Ready | Dropped):
            alive.discard(record.group)
        wave.append(record)
    if not alive:
        yield from wave


def snapshot(
    gate: Gate,
    version: int,
    source: PromptSource,
    prompts: Mapping[int, Prompt],
    finished: Iterable[Group],
    *,
    answers: Iterable[Record] = (),
    evaluated: int | None = None,
    next_record: int = 0,
    attempts: Mapping[str, int] | None = None,
    without_signal: int = 0,
) -> list[Record]:
    """What a checkpoint keeps of a controller, between two steps: the ledger and the data cursor, then every group
    alive (all `prompts`), those `finished` with their answers, and what there is of the other `answers`. `next_record`
    is the number of the journal's next."""
    if gate.count(GroupState.STEPPING):
        raise RuntimeError("a step is in progress: what becomes of its groups is not known yet")
    state = State(
        version=version,
        admitted=gate.admitted,
        trained=gate.trained,
        dropped=dict(gate.dropped),
        source=source.state(),
        next=next_record,
        evaluated=evaluated,
        attempts=dict(attempts or {}),
        without_signal=without_signal,
    )
    alive = [Admitted(group=group, prompt=prompt, version=version) for group, prompt in prompts.items()]
    return [state, *alive, *(ready(group) for group in finished), *answers]
