"""An answer in pieces: its tokens, versions and end, and what is certain of it on the way."""

from __future__ import annotations

from fleuve.rollout.vllm_flight import Flight, StopWatch
from fleuve.rollout.vllm_wire import Choice, Logprobs, Span, Token
from fleuve.types import GenerationRequest, SamplingParams


def flight_of(new: int = 10, output_ids: list[int] | None = None, **sampling: object) -> Flight:
    params = SamplingParams(max_new_tokens=new, **sampling)  # type: ignore[arg-type]
    return Flight(GenerationRequest(request_id="r", input_ids=[1], sampling=params, output_ids=output_ids or []))


def tokens(*ids: int) -> Choice:
    return Choice(token_ids=list(ids), logprobs=Logprobs([Token(i, -i / 8) for i in ids]))


def no_watch(request: GenerationRequest) -> StopWatch | None:
    return None


def test_spans_say_of_which_version_each_token_is() -> None:
    flight = flight_of()
    flight.board("w", 3, no_watch)
    flight.take(tokens(5, 6))
    flight.take(tokens(7))
    flight.close("stop", [Span("3", 0, 1), Span("4", 1, 3)], 0, by_spans=True)
    answer = flight.completion()
    assert (answer.output_ids, answer.versions, answer.finish_reason) == ([5, 6, 7], [3, 4, 4], "stop")
    assert answer.logprobs == [-0.625, -0.75, -0.875]


def test_a_piece_that_an_update_cuts_is_of_one_version_and_the_answer_goes_on_behind_it() -> None:
    flight = flight_of()
    flight.board("w0", 3, no_watch)
    flight.take(tokens(5, 6))
    flight.cut()
    flight.close("abort", None, 0, by_spans=False)
    assert flight.finish is None
    assert flight.meet_update()
    assert flight.begun == [5, 6]
    flight.board("w1", 4, no_watch)
    flight.take(tokens(7))
    flight.close("length", None, 0, by_spans=False)
    answer = flight.completion()
    assert (answer.output_ids, answer.versions, answer.interruptions) == ([5, 6, 7], [3, 3, 4], 1)


def test_an_answer_that_was_not_begun_when_the_update_came_was_not_interrupted() -> None:
    flight = flight_of()
    flight.board("w0", 3, no_watch)
    flight.cut()
    flight.close("abort", None, 0, by_spans=False)
    assert not flight.meet_update()
    assert (flight.finish, flight.interruptions) == (None, 0)


def test_a_cut_at_the_last_token_ends_the_answer() -> None:
    flight = flight_of(new=4, output_ids=[2, 2])
    flight.board("w0", 3, no_watch)
    flight.take(tokens(5, 6))
    flight.cut()
    flight.close("abort", None, 0, by_spans=False)
    assert flight.finish == "length"


def test_an_abort_that_was_asked_for_is_none_that_goes_on() -> None:
    for cut in (False, True):
        flight = flight_of()
        flight.board("w", 3, no_watch)
        flight.take(tokens(5))
        flight.aborted.set()
        if cut:
            flight.cut()
        flight.close("abort", [Span("3", 0, 1)], 0, by_spans=True)
        assert flight.completion().finish_reason == "abort"


def test_of_an_answer_that_an_update_has_met_only_what_came_before_is_certain() -> None:
    """The server names the versions at the end, and what comes after the update may have been sampled before it."""
    flight = flight_of()
    flight.board("w", 3, no_watch)
    flight.take(tokens(5, 6))
    assert flight.progress(1).versions.tolist() == [3]
    flight.meet_update()
    flight.take(tokens(7))
    flight.meet_update()
    part = flight.progress(0)
    assert (part.output_ids.tolist(), part.versions.tolist()) == ([5, 6], [3, 3])
    assert flight.progress(2).output_ids.tolist() == []
    flight.leave()
    answer = flight.completion()
    assert (answer.output_ids, answer.finish_reason) == ([5, 6], "abort")


def test_by_pieces_everything_that_has_come_is_certain() -> None:
    flight = flight_of()
    flight.board("w0", 3, no_watch)
    flight.take(tokens(5))
    flight.cut()
    flight.close("abort", None, 0, by_spans=False)
    flight.meet_update()
    flight.board("w1", 4, no_watch)
    flight.take(tokens(6, 7))
    part = flight.progress(0)
    assert (part.output_ids.tolist(), part.versions.tolist()) == ([5, 6, 7], [3, 4, 4])


def test_a_greedy_token_was_certain() -> None:
    flight = flight_of(temperature=0.0)
    flight.board("w", 0, no_watch)
    flight.take(tokens(5))
    flight.close("length", [Span("0", 0, 1)], 0, by_spans=True)
    assert flight.completion().logprobs == [0.0]


class Watch:
    """Stops once the tokens 6, 7 have come one after the other."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.stopped = False

    def push(self, token: int) -> None:
        self.seen.append(token)
        self.stopped = self.stopped or self.seen[-2:] == [6, 7]


def test_a_stop_string_that_begins_in_one_piece_and_ends_in_the_next_ends_the_answer() -> None:
    flight = flight_of(stop=("67",))
    flight.board("w0", 3, lambda _: Watch())
    assert flight.watch is None  # of the first piece the server sees it all
    flight.take(tokens(5, 6))
    flight.cut()
    flight.close("abort", None, 0, by_spans=False)
    flight.board("w1", 4, lambda _: Watch())
    assert flight.take(tokens(7, 8))
    assert flight.take(tokens(9))
    flight.close("abort", None, 0, by_spans=False)
    answer = flight.completion()
    assert (answer.output_ids, answer.versions, answer.finish_reason) == ([5, 6, 7], [3, 3, 4], "stop")
