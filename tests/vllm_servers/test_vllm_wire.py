"""What goes over the wire to vLLM, without the wire: versions of tokens, seeds of pieces, streams, counters."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleuve.rollout.vllm_wire import (
    Choice,
    Logprobs,
    Span,
    Token,
    WireError,
    body,
    choices,
    counters,
    piece_seed,
    reason,
    refusal,
    tokens_of,
    version_of,
    versions_of,
)
from fleuve.types import GenerationRequest, SamplingParams

# --- versions -------------------------------------------------------------------------------------------------------


def test_each_token_has_the_version_of_its_span() -> None:
    assert versions_of([Span("default", 0, 2), Span("7", 2, 3)], 3, initial=0) == [0, 0, 7]
    assert versions_of([], 0, initial=0) == []


@given(st.lists(st.integers(min_value=1, max_value=5), max_size=6))
def test_spans_tile_the_answer(lengths: list[int]) -> None:
    spans, start = [], 0
    for number, length in enumerate(lengths):
        spans.append(Span(str(number), start, start + length))
        start += length
    assert versions_of(spans, start, 0) == [v for v, length in enumerate(lengths) for _ in range(length)]
    for wrong in (start + 1, start - 1):
        with pytest.raises(WireError):
            versions_of(spans, wrong, 0)


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [Span("1", 1, 3)],
        [Span("1", 0, 2), Span("2", 1, 3)],
        [Span("1", 0, 1), Span("2", 2, 3)],
        [Span("1", 0, 4), Span("2", 4, 3)],
        [Span("another run's", 0, 3)],
        [Span("-1", 0, 3)],
    ],
    ids=str,
)
def test_spans_that_leave_a_token_without_one_version_are_refused(spans: list[Span] | None) -> None:
    with pytest.raises(WireError):
        versions_of(spans, 3, initial=0)


def test_the_weights_that_a_server_was_started_with_have_the_run_s_first_version() -> None:
    assert version_of("default", initial=4) == 4
    assert version_of("12", initial=4) == 12


# --- requests -------------------------------------------------------------------------------------------------------


def request(**changes: object) -> GenerationRequest:
    sampling = {"max_new_tokens": 10, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": ("x",)}
    given = {k: changes.pop(k) for k in tuple(changes) if k in ("input_ids", "output_ids")}
    params = SamplingParams(**{**sampling, **changes})  # type: ignore[arg-type]
    return GenerationRequest(**{"request_id": "r", "input_ids": [4, 5], "sampling": params, **given})  # type: ignore[arg-type]


def test_a_piece_goes_on_behind_what_has_begun_and_has_the_rest_of_the_tokens() -> None:
    asked = body(request(), [7, 8, 9], "w", "salt")
    assert asked["token_ids"] == [4, 5, 7, 8, 9]
    assert asked["sampling_params"]["max_tokens"] == 7
    assert asked["sampling_params"]["seed"] != 3


def test_the_first_piece_has_the_answer_s_own_seed_and_each_other_one_of_its_own() -> None:
    seeds = [piece_seed(3, begun) for begun in range(50)]
    assert seeds[0] == 3
    assert len(set(seeds)) == 50
    assert seeds != [piece_seed(4, begun) for begun in range(50)]


@given(st.integers(min_value=-(2**70), max_value=2**70), st.integers(min_value=0, max_value=10**6))
def test_every_seed_is_one_that_the_server_takes(seed: int, begun: int) -> None:
    assert 0 <= piece_seed(seed, begun) < 2**63


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"output_ids": [1] * 10}, "nothing is left"),
        ({"max_new_tokens": 63}, "the context is 64"),
    ],
    ids=str,
)
def test_what_the_server_would_cut_short_or_take_for_something_else_is_refused(
    changes: dict[str, object], why: str
) -> None:
    assert why in refusal(request(**changes), context=64)


def test_a_request_that_fills_the_context_is_none_to_refuse() -> None:
    assert refusal(request(max_new_tokens=62), context=64) == ""
    assert refusal(request(max_new_tokens=10**6), context=None) == ""


# --- streams --------------------------------------------------------------------------------------------------------


def chunk(ids: list[int], finish: str | None = None) -> bytes:
    content = [{"token_id": i, "logprob": -i / 10, "rank": 1, "top_logprobs": []} for i in ids]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
    return b"data: " + msgspec.json.encode({"request_id": "r", "choices": [choice]}) + b"\n\n"


async def split(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
async def test_a_stream_is_read_however_it_is_cut_into_packets(size: int) -> None:
    data = chunk([1]) + b": still there\n\n" + chunk([2, 3]) + chunk([4], "stop") + b"data: [DONE]\n\n" + b"data: x\n\n"
    found = [choice async for choice in choices(split(data, size))]
    assert [choice.token_ids for choice in found] == [[1], [2, 3], [4]]
    assert [tokens_of(choice)[1] for choice in found] == [[-0.1], [-0.2, -0.3], [-0.4]]
    assert found[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error": {"message": "CUDA error", "type": "InternalServerError", "code": 500}}\n\n',
        b"data: {not json\n\n",
        b'data: {"choices": [{"token_ids": ["a"]}]}\n\n',
    ],
    ids=str,
)
async def test_what_is_no_piece_of_an_answer_is_an_error(event: bytes) -> None:
    with pytest.raises(WireError) as error:
        _ = [choice async for choice in choices(split(chunk([1]) + event, 50))]
    assert "\n" not in str(error.value)


def test_a_log_probability_that_is_none_or_of_another_token_is_an_error() -> None:
    for logprob, token in ((-9999.0, 1), (float("nan"), 1), (-0.5, 2)):
        with pytest.raises(WireError):
            tokens_of(Choice(token_ids=[1], logprobs=Logprobs([Token(token, logprob)])))
    with pytest.raises(WireError):
        tokens_of(Choice(token_ids=[1], logprobs=None))
    assert tokens_of(Choice(finish_reason="abort")) == ([], [])


# --- what it says of itself -----------------------------------------------------------------------------------------


def test_the_counters_have_the_names_of_the_embedded_engine_and_are_summed_over_engines() -> None:
    text = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.25e+03
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
python_info{x="y"} 1.0
"""
    assert counters(text) == {"running": 5.0, "waiting": 1.0, "tokens_generated": 1250.0}
    with pytest.raises(WireError, match="tokens_generated"):
        counters("vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n")
    with pytest.raises(WireError, match="cannot be read"):
        counters("vllm:num_requests_running{} many")


def test_an_error_is_told_in_one_line_whatever_its_shape() -> None:
    assert reason(b'{"error": {"message": "too\\nlong", "code": 400}}') == "too long"
    assert reason(b'{"detail": "Not Found"}') == "Not Found"
    assert reason(b'{"error": "Failed to pause generation: x"}') == "Failed to pause generation: x"
    assert reason(b"Internal Server Error") == "Internal Server Error"
    assert reason(b"\xff\xfe") != ""
    assert reason(b"{}") == "{}"
