"""What goes over the wire to a vLLM server and back, without the wire: requests, tokens, versions, counters."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from fleuve.types import GenerationRequest

UNLABELLED = "default"
"""What vLLM calls the weights that it was started with."""
IMPOSSIBLE = -9999.0
"""What vLLM writes for a log-probability that is no number."""
PLAIN = 100
"""Characters that are told of an answer that is neither JSON nor a page."""


class WireError(ValueError):
    """What came cannot be: one line."""


class Span(msgspec.Struct):
    """Tokens `start` to `end` (exclusive) of an answer, sampled by one version of the weights."""

    version: str
    start: int
    end: int


class Token(msgspec.Struct):
    """A sampled token and its log-probability."""

    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    """Of the tokens of one chunk."""

    content: list[Token] | None = None


class Choice(msgspec.Struct):
    """The next tokens of an answer; the last chunk has the reason for its end, and the spans of all its tokens."""

    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class Chunk(msgspec.Struct):
    """One event of the stream."""

    choices: list[Choice] = []
    error: Any = None


def body(request: GenerationRequest, begun: Sequence[int], wire_id: str, salt: str) -> dict[str, Any]:
    """Of `POST /inference/v1/generate`: the answer goes on behind `begun`. `salt` parts the cached prefixes of
    versions: blocks that other weights have computed do not match."""
    sampling = request.sampling
    return {
        "request_id": wire_id,
        "token_ids": [*request.input_ids, *begun],
        "stream": True,
        "cache_salt": salt,
        "sampling_params": {
            "n": 1,
            "max_tokens": sampling.max_new_tokens - len(begun),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": piece_seed(sampling.seed, len(begun)),
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": True,
        },
    }


def piece_seed(seed: int, begun: int) -> int:
    """The seed of an answer's piece behind its first `begun` tokens. A generator that began afresh with the answer's
    own seed would draw for these tokens what it has drawn for the first ones."""
    if not begun:
        return seed & (2**63 - 1)
    digest = hashlib.blake2b(f"{seed}/{begun}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def refusal(request: GenerationRequest, context: int | None) -> str:
    """Why `request` cannot be served, where the server would not say so; empty if it can."""
    sampling, begun = request.sampling, len(request.output_ids)
    if not request.input_ids:
        return "input_ids is empty: give at least one token"
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens is {sampling.max_new_tokens}: it must be at least 1"
    if begun >= sampling.max_new_tokens:
        return f"output_ids has {begun} tokens, and max_new_tokens is {sampling.max_new_tokens}: nothing is left"
    need = len(request.input_ids) + sampling.max_new_tokens
    if context is not None and need > context:
        return (
            f"{len(request.input_ids)} prompt tokens and {sampling.max_new_tokens} new ones: the context is {context}"
        )
    return ""


async def choices(content: AsyncIterator[bytes]) -> AsyncIterator[Choice]:
    """What a stream of server-sent events brings, until its proper end or where it breaks off.

    Raises:
        WireError: an event is none, or the server says what went wrong.
    """
    buffer = b""
    async for data in content:
        *whole, buffer = (buffer + data).split(b"\n\n")
        for event in whole:
            if not event.startswith(b"data: "):
                continue  # a comment, which keeps the connection alive
            payload = event[len(b"data: ") :]
            if payload == b"[DONE]":
                return
            try:
                chunk = msgspec.json.decode(payload, type=Chunk)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise WireError(f"an event of the stream cannot be read: {error}") from error
            if chunk.error is not None:
                raise WireError(reason(payload))
            for choice in chunk.choices:
                yield choice


def tokens_of(choice: Choice) -> tuple[list[int], list[float]]:
    """The tokens of a chunk and their log-probabilities.

    Raises:
        WireError: they do not belong together, or a log-probability is none.
    """
    ids = choice.token_ids or []
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if [token.token_id for token in content] != ids:
        raise WireError(f"{len(ids)} tokens came with the log-probabilities of {len(content)} others")
    for token in content:
        if not token.logprob > IMPOSSIBLE:
            raise WireError(f"the log-probability of token {token.token_id} is no number: are the weights finite?")
    return ids, [token.logprob for token in content]


def versions_of(spans: Sequence[Span] | None, count: int, initial: int) -> list[int]:
    """The version of each of `count` tokens. `initial` is that of the weights that the server was started with.

    Example: spans `default` 0 to 2 and `7` 2 to 3, `initial` 0: [0, 0, 7].

    Raises:
        WireError: the spans do not cover each token once, or name what is no version.
    """
    if spans is None:
        if count:
            raise WireError("the server does not say which weights sampled the tokens")
        return []
    versions: list[int] = []
    for span in spans:
        if span.start != len(versions) or span.end < span.start:
            raise WireError(f"a span of versions begins at token {span.start}, expected was {len(versions)}")
        versions += [version_of(span.version, initial)] * (span.end - span.start)
    if len(versions) != count:
        raise WireError(f"the spans of versions cover {len(versions)} tokens, and {count} came")
    return versions


def version_of(label: str, initial: int) -> int:
    """The policy version that a label of vLLM's stands for.

    Raises:
        WireError: it is none of ours.
    """
    if label == UNLABELLED:
        return initial
    if not label.isascii() or not label.isdecimal():
        raise WireError(f"the server's weights are called {label!r}, which is no policy version")
    return int(label)


_COUNTERS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "tokens_generated",
    "vllm:prompt_tokens_total": "tokens_prefilled",
    "vllm:kv_cache_usage_perc": "kv_cache_use",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
}


def counters(text: str) -> dict[str, float]:
    """Those of vLLM's metrics (Prometheus' text format) that the embedded engine has too, under its names; those of
    several engines behind one server are added up.

    Raises:
        WireError: the ones that must be there are not, or a value is no number.
    """
    found: dict[str, float] = {}
    for name, value in _samples(text):
        if (ours := _COUNTERS.get(name)) is not None:
            found[ours] = found.get(ours, 0.0) + value
    if missing := {"running", "waiting", "tokens_generated"} - found.keys():
        raise WireError(f"its metrics say nothing of {', '.join(sorted(missing))}")
    return found


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        series, _, value = line.rpartition(" ")
        try:
            yield series.partition("{")[0], float(value)
        except ValueError:
            raise WireError(f"a metric that cannot be read: {line[:200]}") from None


def reason(reply: bytes) -> str:
    """What a server's error says, in one line: the innermost `message`, `error` or `detail` of its JSON, or all; of
    what is no JSON, and so not of vLLM, the beginning of a plain text, and nothing of a page."""
    try:
        found: Any = msgspec.json.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = " ".join(reply.decode(errors="replace").split())
        return "" if text.startswith("<") else text[:PLAIN]
    while isinstance(found, Mapping):
        found = next((found[key] for key in ("error", "message", "detail") if found.get(key)), str(dict(found)))
    return " ".join(str(found).split())[:2000]
