"""What is known of an unfinished answer: pieces in any cuts give the whole, and nothing else is added."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleuve.control.begun import Begun
from fleuve.types import Completion, Progress

TOKENS = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32), st.integers(0, 10**6)),
    max_size=30,
)


def piece(tokens: list[tuple[int, float, int]], start: int) -> Progress:
    ids, logprobs, versions = zip(*tokens, strict=True) if tokens else ((), (), ())
    return Progress(
        request_id="a",
        start=start,
        output_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
    )


def completion(tokens: list[tuple[int, float, int]]) -> Completion:
    ids, logprobs, versions = zip(*tokens, strict=True) if tokens else ((), (), ())
    return Completion(
        request_id="a",
        output_ids=list(ids),
        logprobs=list(logprobs),
        versions=list(versions),
        finish_reason="stop",
        interruptions=2,
    )


@given(TOKENS, st.lists(st.integers(0, 30), max_size=5), st.integers(0, 30))
def test_pieces_in_any_cuts_and_the_rest_are_the_whole_answer_to_the_last_bit(tokens, cuts, last):
    known = tokens[:last]
    begun = Begun()
    edges = [0, *sorted(min(cut, len(known)) for cut in cuts), len(known)]
    for start, end in itertools.pairwise(edges):
        begun.add(piece(known[start:end], start))
    assert begun.output_ids == [token for token, _, _ in known]
    assert begun.ended(completion(tokens[last:])) == completion(tokens)


@given(TOKENS, TOKENS, TOKENS)
def test_what_the_next_worker_sampled_follows(first, second, rest):
    begun, more = Begun(), Begun()
    begun.add(piece(first, 0))
    more.add(piece(second, 0))
    begun.follow(more)
    assert begun.ended(completion(rest)) == completion([*first, *second, *rest])


def test_a_piece_that_comes_twice_or_too_late_is_not_added():
    begun = Begun()
    begun.add(piece([(1, -1.0, 0), (2, -1.0, 0)], 0))
    begun.add(piece([(1, -1.0, 0), (2, -1.0, 0)], 0))
    begun.add(piece([(9, -1.0, 0)], 5))
    assert begun.output_ids == [1, 2]
