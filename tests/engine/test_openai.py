"""The OpenAI endpoints over real HTTP, and that no request of theirs holds up the server."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from served import Client
from tiny_engine import ask

from fleuve.engine.server import MAX_BODY


async def sse(client: Client, path: str, body: dict) -> list[dict]:
    """The events of a streamed answer, the closing [DONE] checked."""
    async with client.session.post(client.url + path, json=body | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        lines = [x.removeprefix("data: ") for x in (await response.text()).split("\n\n") if x]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_completions_answers_text_with_usage_and_a_choice_for_each_sample(client: Client) -> None:
    tokenizer = client.service.tokenizer
    body = {"prompt": "12+3*4?", "max_tokens": 25, "n": 3, "seed": 8, "logprobs": 1, "ignore_eos": True}
    reply = await client.json("/v1/completions", body)
    assert reply["usage"] == {"prompt_tokens": 7, "completion_tokens": 75, "total_tokens": 82}
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    for choice in reply["choices"]:
        ids = tokenizer.encode("12+3*4?")
        own = await client.generate(ask("x", ids, new=25, seed=8 + choice["index"]))
        assert choice["text"] == tokenizer.decode(own.output_ids, skip_special_tokens=True)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own.logprobs, abs=1e-4)
        assert choice["finish_reason"] == "length"


async def test_a_streamed_answer_is_the_whole_one_in_pieces(client: Client) -> None:
    body = {"prompt": ["1+1?", "2+2?"], "max_tokens": 40, "n": 2, "seed": 8, "stop": ["7", "ab"], "logprobs": 1}
    whole = await client.json("/v1/completions", body)
    events = await sse(client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        pieces = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
        assert "".join(p["text"] for p in pieces) == choice["text"]
        assert [p["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        tokens = [t for p in pieces for t in p["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]


async def test_a_stop_string_is_cut_off_the_text(client: Client) -> None:
    body = {"prompt": "1+1?", "max_tokens": 60, "seed": 5, "ignore_eos": True}
    free = (await client.json("/v1/completions", body))["choices"][0]["text"]
    stop = free[20:23]
    stopped = (await client.json("/v1/completions", body | {"stop": stop}))["choices"][0]
    assert stopped["text"] == free[: free.index(stop)]
    assert stopped["finish_reason"] == "stop"


async def test_chat_goes_through_the_template_and_streams(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 30, "seed": 5, "logprobs": True}
    reply = await client.json("/v1/chat/completions", body)
    message = reply["choices"][0]["message"]
    ids = client.service.tokenizer.encode("user: 1+1?;assistant: ")
    own = await client.generate(ask("x", ids, new=30, seed=5, ignore_eos=False))
    assert message == {
        "role": "assistant",
        "content": client.service.tokenizer.decode(own.output_ids, skip_special_tokens=True),
    }
    assert reply["usage"]["prompt_tokens"] == len(ids)
    assert len(reply["choices"][0]["logprobs"]["content"]) == len(own.output_ids)
    events = await sse(client, "/v1/chat/completions", body)
    assert "".join(e["choices"][0]["delta"]["content"] for e in events) == message["content"]
    assert (await client.json("/v1/models"))["data"][0]["id"] == client.service.model


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": "1", "presence_penalty": 0.5}, "presence_penalty is not supported"),
        ("/v1/completions", {"prompt": "1", "model": "gpt"}, "'gpt' is not served here"),
        ("/v1/completions", {}, "prompt is missing"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 600}, "context is 512"),
        ("/v1/completions", {"prompt": "1", "logprobs": 5}, "no alternatives"),
        (
            "/v1/completions",
            {"prompt": "1", "n": 300_000, "max_tokens": 1},
            "n is 300000: it must be at least 1 and at",
        ),
        ("/v1/completions", {"prompt": "1", "n": 0}, "n is 0"),
        ("/v1/completions", {"prompt": ["1"] * 1025}, "1025 prompts times n are more than 1024"),
        ("/v1/completions", {"prompt": ["1"] * 9, "n": 128}, "9 prompts times n are more than 1024"),
        ("/v1/completions", {"prompt": "1" * 100_000}, "context is 512"),
        ("/v1/completions", {"prompt": "1", "stop": ["x"] * 100_000}, "stop may be 16 strings"),
        ("/v1/completions", {"prompt": "1", "stop": "x" * 100_000}, "256 characters at most"),
        ("/v1/completions", {"prompt": "1", "logit_bias": {"5": 1}}, "logit_bias is not supported"),
        (
            "/v1/completions",
            {"prompt": "1", "temprature": 0.1},
            "temprature is not a field that this engine knows; did",
        ),
        ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function"}]}, "tools is not supported"),
        ("/v1/chat/completions", {"messages": [], "tool_choice": "required"}, "tool_choice is not supported"),
        ("/v1/chat/completions", {"messages": [], "reasoning_effort": "low"}, "reasoning_effort is not a field"),
        ("/v1/chat/completions", {"messages": []}, "messages is missing"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ],
)
async def test_what_openai_s_clients_may_not_ask_is_said_by_name(client: Client, path, body, words) -> None:
    assert words in (await client.json(path, body, status=400))["error"]["message"]


async def test_what_has_no_effect_in_openai_s_standard_is_accepted(client: Client) -> None:
    plain = {"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 5, "seed": 1}
    idle = {"user": "me", "metadata": {"a": "b"}, "store": True, "stream_options": {"include_usage": True}}
    idle |= {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True, "presence_penalty": 0, "logit_bias": None}
    replies = [await client.json("/v1/chat/completions", plain | more) for more in ({}, idle)]
    assert replies[0]["choices"] == replies[1]["choices"]


async def test_no_request_holds_up_the_others(client: Client) -> None:
    """Requests of large sizes, allowed and refused, while a small one is asked again and again."""
    large = [
        {"prompt": "1", "n": 128, "max_tokens": 100, "ignore_eos": True, "logprobs": 1},
        {"prompt": ["12+3*4?"] * 1024, "max_tokens": 1},
        {"prompt": "7" * 2**20},
        {"prompt": [7] * (MAX_BODY // 2 - 100)},
        {"prompt": "1", "n": 300_000, "max_tokens": 1},
        {"prompt": "1", "stop": ["x" * 100] * 50_000},
    ]
    bodies = [json.dumps(body, separators=(",", ":")).encode() for body in large]

    async def ask_large(body: bytes) -> int:
        async with client.session.post(client.url + "/v1/completions", data=body) as response:
            await response.read()
            return response.status

    asking = asyncio.gather(*map(ask_large, bodies))
    slowest = 0.0
    while not asking.done():
        asked = time.monotonic()
        await client.json("/health")
        slowest = max(slowest, time.monotonic() - asked)
        await asyncio.sleep(0.005)
    assert await asking == [200, 200, 400, 400, 400, 400]
    assert slowest < 5.0  # 0.3 s on a quiet machine; one of these held the server up for 15 s and more


@pytest.mark.parametrize("path", ["/generate", "/update_weights", "/v1/completions"])
async def test_a_body_that_is_too_large_is_refused(client: Client, path: str) -> None:
    async with client.session.post(client.url + path, data=b" " * (MAX_BODY + 1)) as response:
        assert response.status == 413
        assert f"larger than {MAX_BODY} bytes" in (await response.json())["error"]["message"]
