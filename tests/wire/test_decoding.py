"""Whatever bytes come over the wire: a value of the kind that was asked for, or one kind of error."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleuve.types import Batch, Group, Int32Array, Prompt, Trajectory, Verdict, decode, encode


class Arrays(msgspec.Struct):
    ids: Int32Array


def raw(code: int, data: bytes) -> bytes:
    return msgspec.msgpack.encode({"ids": msgspec.msgpack.Ext(code, data)})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(raw(1, b"abc"), "3 bytes", id="a broken array"),
        pytest.param(raw(9, b"abcd"), "kind 9", id="an unknown array"),
        pytest.param(raw(2, b"abcd"), "expected an array of int32, got an array of float32", id="another array"),
        pytest.param(msgspec.msgpack.encode({"ids": [1]}), "got list", id="a list"),
        pytest.param(b"\x81\xa3ids\xdd\xff\xff\xff\xff", "truncated", id="a huge length"),
    ],
)
def test_an_array_that_is_none_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=words):
        decode(body, Arrays)


def test_deep_nesting_is_refused() -> None:
    prompt = {"id": "", "input_ids": [], "text": "", "answer": ""}
    body = msgspec.msgpack.encode({**prompt, "row": {"x": 0}})[:-1] + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(msgspec.DecodeError, match="nested too deeply"):
        decode(body, Prompt)


def a_batch() -> Batch:
    answer = Trajectory(
        prompt_ids=np.arange(3, dtype=np.int32),
        output_ids=np.arange(4, dtype=np.int32),
        logprobs=np.zeros(4, np.float32),
        versions=np.zeros(4, np.int32),
        loss_mask=np.ones(4, np.bool_),
        finish_reason="stop",
        reward=1.0,
    )
    prompt = Prompt(id="p", input_ids=[1, 2], text="?", answer="!", row={"a": [1, {"b": None}]})
    return Batch(version=3, groups=[Group(id=1, prompt=prompt, trajectories=[answer], admitted_version=2)])


@given(st.integers(0, len(encode(a_batch())) - 1), st.integers(0, 255))
def test_a_batch_with_any_byte_changed_is_a_batch_or_a_decode_error(place: int, byte: int) -> None:
    body = bytearray(encode(a_batch()))
    body[place] = byte
    try:
        found = decode(bytes(body), Batch)
    except msgspec.DecodeError:
        return
    for trajectory in found.trajectories:
        assert trajectory.output_ids.dtype == np.int32
        assert trajectory.logprobs.dtype == np.float32
        assert trajectory.loss_mask.dtype == np.bool_


@given(st.binary(max_size=200))
def test_any_bytes_are_a_verdict_or_a_decode_error(body: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        assert isinstance(decode(body, Verdict), Verdict)
