"""The journal is what survives of a run: any cut of it, and any damage to it, leaves a prefix of what was written."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleuve.control.journal import (
    Admitted,
    Answer,
    Dropped,
    Evaluated,
    Judged,
    Ready,
    Record,
    State,
    Step,
    frame,
    in_turn,
    unframe,
)
from fleuve.control.past import Past
from fleuve.types import Prompt, Trajectory, Verdict


def prompt(name: str) -> Prompt:
    return Prompt(id=name, input_ids=[1, 2], text="1+1?", answer="2", row={"level": 3, "tags": ["a"]})


def trajectory(tokens: int, reward: float | None = 1.0) -> Trajectory:
    return Trajectory(
        prompt_ids=np.array([1, 2], np.int32),
        output_ids=np.arange(tokens, dtype=np.int32),
        logprobs=-np.arange(tokens, dtype=np.float32) / 7,
        versions=np.full(tokens, 3, np.int32),
        loss_mask=np.arange(tokens) % 2 == 0,
        finish_reason="stop",
        reward=reward,
        text="2",
    )


def answer(tokens: int, finish_reason: str | None) -> Answer:
    return Answer(
        group=1,
        request_id="1/0",
        asked=2**32 - 1,
        output_ids=np.arange(tokens, dtype=np.int32),
        logprobs=-np.arange(tokens, dtype=np.float32) / 7,
        versions=np.full(tokens, 3, np.int32),
        finish_reason=finish_reason,
    )


IDS = st.integers(0, 2**40)
RECORDS = st.one_of(
    st.builds(Admitted, group=IDS, prompt=st.builds(prompt, st.text(max_size=5)), version=IDS),
    st.builds(
        Ready,
        group=IDS,
        trajectories=st.lists(st.builds(trajectory, st.integers(0, 9), st.none() | st.floats(0, 1)), max_size=3),
        admitted_version=IDS,
    ),
    st.builds(answer, st.integers(0, 9), st.sampled_from([None, "stop", "length"])),
    st.builds(
        Judged,
        group=IDS,
        request_id=st.text(max_size=5),
        verdict=st.builds(Verdict, score=st.none() | st.floats(0, 1), reason=st.text(max_size=5)),
    ),
    st.builds(Dropped, group=IDS, reason=st.text(max_size=8), again=st.booleans()),
    st.builds(Step, version=IDS, groups=st.lists(IDS, max_size=4), trained=st.lists(IDS, max_size=4)),
    st.builds(Evaluated, version=IDS),
    st.builds(
        State,
        version=IDS,
        admitted=IDS,
        trained=IDS,
        dropped=st.dictionaries(st.text(max_size=5), IDS, max_size=2),
        source=st.dictionaries(st.text(max_size=5), IDS | st.text(max_size=5), max_size=2),
        next=IDS,
        evaluated=st.none() | IDS,
        attempts=st.dictionaries(st.text(max_size=5), IDS, max_size=2),
    ),
)


def bytes_of(records: list[Record], first: int = 0) -> bytes:
    return b"".join(frame(record, first + i) for i, record in enumerate(records))


def same(a: list[Record], b: list[Record]) -> bool:
    return bytes_of(a) == bytes_of(b)


@given(st.lists(RECORDS, max_size=6), st.integers(1, 50))
def test_what_is_written_is_read_whatever_the_chunks(records, size):
    data = bytes_of(records)
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    assert same(list(in_turn(unframe(chunks), 0)), records)


@given(st.lists(RECORDS, max_size=4), st.data())
def test_any_cut_of_the_bytes_gives_a_prefix_of_the_records(records, data):
    stream = bytes_of(records)
    cut = data.draw(st.integers(0, len(stream)))
    read = list(in_turn(unframe([stream[:cut]]), 0))
    assert same(read, records[: len(read)])
    whole = sum(len(bytes_of(records[: n + 1])) <= cut for n in range(len(records)))
    assert len(read) == whole


@given(st.lists(RECORDS, min_size=1, max_size=4), st.data())
def test_a_damaged_byte_ends_the_journal_there(records, data):
    stream = bytearray(bytes_of(records))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= data.draw(st.integers(1, 255))
    read = list(in_turn(unframe([bytes(stream)]), 0))
    before = sum(len(bytes_of(records[: n + 1])) <= at for n in range(len(records)))
    assert len(read) == before
    assert same(read, records[:before])


@given(st.lists(RECORDS, min_size=3, max_size=6), st.data())
def test_a_missing_record_ends_the_journal_there(records, data):
    missing = data.draw(st.integers(0, len(records) - 2))
    frames = [frame(record, i) for i, record in enumerate(records)]
    del frames[missing]
    assert same(list(in_turn(unframe(frames), 0)), records[:missing])


@given(st.lists(RECORDS, max_size=6), st.integers(0, 6))
def test_reading_begins_with_the_number_that_is_asked_for(records, first):
    assert same(list(in_turn(unframe([bytes_of(records)]), first)), records[first:])


def test_the_past_is_what_the_records_come_to():
    past = Past()
    for record in [
        Admitted(group=0, prompt=prompt("a"), version=0),
        Admitted(group=1, prompt=prompt("b"), version=0),
        Admitted(group=2, prompt=prompt("c"), version=0),
        Ready(group=1, trajectories=[trajectory(3)], admitted_version=0),
        Dropped(group=0, reason="timeout", again=True),
    ]:
        assert past.apply(record) is None
    batch = past.apply(Step(version=1, groups=[1], trained=[1]))
    assert [group.prompt.id for group in batch.groups] == ["b"]
    assert batch.version == 0
    assert (past.version, past.admitted, past.trained, past.dropped) == (1, 3, 1, {"timeout": 1})
    assert list(past.running) == [2]
    assert not past.ready


def test_answers_belong_to_groups_that_run_and_the_last_word_on_each_counts():
    past = Past()
    past.apply(Admitted(group=1, prompt=prompt("b"), version=0))
    past.apply(answer(3, None))
    past.apply(answer(5, "stop"))
    past.apply(Judged(group=1, request_id="1/0", verdict=Verdict(score=1.0)))
    past.apply(Judged(group=7, request_id="7/0", verdict=Verdict(score=1.0)))
    assert set(past.answers) == {1}
    assert (past.answers[1].ended, past.answers[1].tokens) == (1, 5)
    assert past.answers[1].verdict("1/0") == Verdict(score=1.0)
    past.apply(Ready(group=1, trajectories=[trajectory(5)], admitted_version=0))
    assert not past.answers


def test_a_prompt_that_failed_before_has_one_try_left_after():
    past = Past()
    past.apply(Admitted(group=0, prompt=prompt("a"), version=0))
    past.apply(Dropped(group=0, reason="timeout", again=True))
    past.apply(Admitted(group=1, prompt=prompt("b"), version=0))
    past.apply(Dropped(group=1, reason="overdue", again=True))
    assert past.failures.attempts == {"a": 1}
    restored = Past()
    restored.apply(State(version=0, admitted=2, trained=0, dropped={}, source={}, attempts=past.failures.attempts))
    restored.apply(Admitted(group=2, prompt=prompt("a"), version=0))
    restored.apply(Dropped(group=2, reason="timeout", again=False))
    assert restored.failures.attempts == {}


@pytest.mark.parametrize("tokens", [0, 1, 1000])
def test_an_answer_costs_12_bytes_a_token_and_little_else(tokens):
    assert len(frame(answer(tokens, "stop"), 0)) <= 12 * tokens + 170


def test_a_step_that_was_cut_short_leaves_its_groups_ready():
    past = Past()
    for group in (0, 1):
        past.apply(Admitted(group=group, prompt=prompt(f"p{group}"), version=0))
        past.apply(Ready(group=group, trajectories=[trajectory(3)], admitted_version=0))
    assert past.apply(Step(version=1, groups=[0, 1], trained=[0])) is None
    assert past.version == 0
    assert list(past.ready) == [0, 1]


@pytest.mark.parametrize("tokens", [0, 1, 1000])
def test_a_group_costs_13_bytes_a_token_and_little_else(tokens):
    record = Ready(group=1, trajectories=[trajectory(tokens)], admitted_version=0)
    assert len(frame(record, 0)) <= 13 * tokens + 350
