"""An answer between two processes: raw arrays in msgpack, lists in JSON."""

from __future__ import annotations

import msgspec
import numpy as np

from fleuve.types import Completion, PackedCompletion, decode, encode, to_json

ANSWER = Completion(
    request_id="3/1",
    output_ids=[7, 151_000, 2],
    logprobs=[-0.5, 0.0, -20.25],
    versions=[4, 4, 5],
    finish_reason="stop",
    interruptions=1,
)


def test_an_answer_comes_over_the_wire_as_it_was_in_arrays_that_are_not_read_number_by_number() -> None:
    body = encode(PackedCompletion.of(ANSWER))
    opened = decode(body, PackedCompletion).opened()
    assert np.asarray(ANSWER.logprobs, np.float32).tobytes() in body
    assert [type(a) for a in (opened.output_ids, opened.logprobs, opened.versions)] == [np.ndarray] * 3
    assert msgspec.json.decode(to_json(opened), type=Completion) == ANSWER


def test_a_client_that_takes_json_reads_lists() -> None:
    assert msgspec.json.decode(to_json(PackedCompletion.of(ANSWER)), type=Completion) == ANSWER
