"""`/v1/models`, `/v1/completions` and `/v1/chat/completions` as OpenAI's clients speak them, streaming included.

A field that would change the answer and that this engine does not know (penalties, logit_bias, tools, a misspelt
name, …) is refused by name rather than ignored, unless it is set to what it would be anyway. Fields that change nothing
(user, metadata, …) are passed over.

Reading a request and writing a whole reply take time that grows with their size: both are done in threads, so that no
request holds up the others.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from fleuve.config.nearest import did_you_mean, nearest
from fleuve.engine.detokenizer import Detokenizer
from fleuve.engine.engine import RequestError
from fleuve.engine.prompts import tokens_of
from fleuve.engine.service import Service
from fleuve.types import GenerationRequest, SamplingParams

MAX_SAMPLES = 128  # answers to one prompt
MAX_CHOICES = 1024  # answers in one reply
DEFAULT_MAX_TOKENS = 16  # of /v1/completions; a chat answer may fill the context
MAX_SEED = 2**63
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # field → the values that mean nothing
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
WITHOUT_EFFECT = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",  # a guess that may save time
        "parallel_tool_calls",  # there are no tools
    ]
)


class Message(msgspec.Struct):
    """One turn of a chat."""

    role: str
    content: str | list[dict[str, Any]]


class StreamOptions(msgspec.Struct):
    """`include_usage`: a last chunk with the token counts."""

    include_usage: bool = False


class Body(msgspec.Struct, kw_only=True):
    """The fields of both endpoints; `prompt` belongs to the one, `messages` to the other."""

    model: str | None = None
    prompt: Any = None  # str | list[str] | list[int] | list[list[int]]
    messages: list[Message] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


BODY_FIELDS = frozenset(Body.__struct_fields__)


@dataclass(slots=True)
class Choice:
    """One answer in the making; `index` is its place in the reply."""

    index: int
    request: GenerationRequest
    text: Detokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What one answer has grown by; the last has a finish reason."""

    choice: Choice
    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None = None


def routes(service: Service) -> list[web.RouteDef]:
    """The routes over one served model."""

    async def models(_: web.Request) -> web.Response:
        card = {"id": service.model, "object": "model", "created": service.created, "owned_by": "fleuve"}
        return web.json_response({"object": "list", "data": [card]})

    async def completions(request: web.Request) -> web.StreamResponse:
        return await _answer(service, request, chat=False)

    async def chat_completions(request: web.Request) -> web.StreamResponse:
        return await _answer(service, request, chat=True)

    return [
        web.get("/v1/models", models),
        web.post("/v1/completions", completions),
        web.post("/v1/chat/completions", chat_completions),
    ]


async def _answer(service: Service, request: web.Request, chat: bool) -> web.StreamResponse:
    body, choices, form = await asyncio.to_thread(_prepare, service, await request.read(), chat)
    if body.stream:
        return await _stream(service, request, choices, form)
    return await _whole(service, choices, form)


def _prepare(service: Service, raw: bytes, chat: bool) -> tuple[Body, list[Choice], _Form]:
    """Read a request; no part of it has begun after that.

    Raises:
        RequestError, msgspec.DecodeError: it cannot be served as it is.
    """
    fields = msgspec.json.decode(raw, type=dict[str, Any])
    _refuse_unsupported(fields)
    body = msgspec.convert(fields, Body)
    if body.top_logprobs or (isinstance(body.logprobs, int) and body.logprobs > 1):
        raise RequestError("only the sampled token's own log-probability is given: no alternatives")
    if body.model is not None and body.model not in (service.model, service.name):
        raise RequestError(f"model {body.model!r} is not served here; {service.model!r} is")
    samples = 1 if body.n is None else body.n
    if not 1 <= samples <= MAX_SAMPLES:
        raise RequestError(f"n is {samples}: it must be at least 1 and at most {MAX_SAMPLES}")
    prompts = _chat_prompt(service, body) if chat else _prompts(service, body, MAX_CHOICES // samples)
    choices = _choices(service, body, prompts, samples, chat)
    for choice in choices[::samples]:  # the answers to one prompt differ by their seeds alone
        service.loop.engine.check(choice.request)
    return body, choices, _Form(service, chat, body, sum(len(p) for p in prompts))


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    """Raises:
    RequestError: a field would change the answer, and this engine does not know it.
    """
    for name, value in fields.items():
        if name in BODY_FIELDS or name in WITHOUT_EFFECT or value is None:
            continue
        if name not in UNSUPPORTED:
            raise RequestError(
                f"{name} is not a field that this engine knows{did_you_mean(nearest(name, BODY_FIELDS))}"
            )
        if value not in UNSUPPORTED[name]:
            raise RequestError(f"{name} is not supported by this engine")


def _prompts(service: Service, body: Body, most: int) -> list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt is missing: give a string, a list of strings, or token ids")
    if len(prompt) > most:
        raise RequestError(f"{len(prompt)} prompts times n are more than {MAX_CHOICES} answers: split the request")
    return [
        tokens_of(service.tokenizer, p, service.context) if isinstance(p, str) else msgspec.convert(p, list[int])
        for p in prompt
    ]


def _chat_prompt(service: Service, body: Body) -> list[list[int]]:
    if not body.messages:
        raise RequestError("messages is missing or empty")
    if not getattr(service.tokenizer, "chat_template", None):
        raise RequestError(f"{service.model} has no chat template: use /v1/completions")
    messages = [{"role": m.role, "content": _text(m.content)} for m in body.messages]
    text = service.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [tokens_of(service.tokenizer, text, service.context, special=False)]


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    other = sorted({str(part.get("type")) for part in content if part.get("type") != "text"})
    if other:
        raise RequestError(f"message parts of type {', '.join(other)} are not supported: text only")
    return "".join(str(part.get("text", "")) for part in content)


def _choices(service: Service, body: Body, prompts: list[list[int]], samples: int, chat: bool) -> list[Choice]:
    stop = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    seed = secrets.randbelow(MAX_SEED) if body.seed is None else body.seed
    base = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    choices: list[Choice] = []
    for prompt in prompts:
        wanted = body.max_completion_tokens or body.max_tokens
        default = service.context - len(prompt) if chat else DEFAULT_MAX_TOKENS
        for _ in range(samples):
            sampling = SamplingParams(
                max_new_tokens=default if wanted is None else wanted,
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=max(body.top_k or 0, 0),
                stop=tuple(stop),
                stop_token_ids=tuple(body.stop_token_ids or ()),
                seed=(seed + len(choices)) % MAX_SEED,
                ignore_eos=body.ignore_eos,
            )
            index = len(choices)
            request = GenerationRequest(request_id=f"{base}-{index}", input_ids=prompt, sampling=sampling)
            choices.append(Choice(index, request, Detokenizer(service.tokenizer, prompt, stop)))
    return choices


async def _deltas(service: Service, choices: list[Choice]) -> AsyncGenerator[Delta, None]:
    """What all the answers grow by, as it happens. Leaving early cancels, and so aborts, what is still running."""
    grown: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

    async def one(choice: Choice) -> None:
        held_tokens: list[int] = []
        held_logprobs: list[float] = []

        def on_token(token: int, logprob: float) -> None:
            held_tokens.append(token)
            held_logprobs.append(logprob)
            choice.text.push(token)
            if text := choice.text.take():
                grown.put_nowait(Delta(choice, text, held_tokens[:], held_logprobs[:]))
                held_tokens.clear()
                held_logprobs.clear()

        try:
            completion = await service.loop.generate(choice.request, on_token)
            reason = completion.finish_reason
            grown.put_nowait(Delta(choice, choice.text.finish(), held_tokens, held_logprobs, reason))
        except Exception as error:
            grown.put_nowait(error)

    tasks = [asyncio.create_task(one(choice)) for choice in choices]
    open_answers = len(tasks)
    try:
        while open_answers:
            delta = await grown.get()
            if isinstance(delta, BaseException):
                raise delta
            open_answers -= delta.finish_reason is not None
            yield delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Form:
    """How replies are written: the differences between the two endpoints, and between whole and streamed."""

    def __init__(self, service: Service, chat: bool, body: Body, prompt_tokens: int) -> None:
        self.service = service
        self.chat = chat
        self.logprobs = body.logprobs is not None and body.logprobs is not False
        self.include_usage = body.stream_options is not None and body.stream_options.include_usage
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def reply(self, choices: list[dict[str, Any]], streamed: bool, usage: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        reply: dict[str, Any] = {"id": self._id, "object": kind, "created": self._created}
        reply |= {"model": self.service.model, "choices": choices}
        if usage:
            reply["usage"] = {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
            }
        return reply

    def choice(self, delta: Delta, streamed: bool) -> dict[str, Any]:
        self.completion_tokens += len(delta.tokens)
        choice: dict[str, Any] = {"index": delta.choice.index, "finish_reason": delta.finish_reason}
        choice["logprobs"] = self._logprobs(delta) if self.logprobs else None
        if not self.chat:
            return choice | {"text": delta.text}
        message = {"role": "assistant", "content": delta.text}
        return choice | {"delta" if streamed else "message": message}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        tokens = [str(self.service.tokenizer.decode([t])) for t in delta.tokens]
        if self.chat:
            rows = zip(tokens, delta.logprobs, strict=True)
            return {
                "content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in rows]
            }
        offsets, at = [], 0
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {"tokens": tokens, "token_logprobs": delta.logprobs, "top_logprobs": None, "text_offset": offsets}


async def _whole(service: Service, choices: list[Choice], form: _Form) -> web.Response:
    parts: dict[int, list[Delta]] = {choice.index: [] for choice in choices}
    async with aclosing(_deltas(service, choices)) as deltas:
        async for delta in deltas:
            parts[delta.choice.index].append(delta)
    return web.Response(body=await asyncio.to_thread(_written, parts, form), content_type="application/json")


def _written(parts: dict[int, list[Delta]], form: _Form) -> bytes:
    """The whole reply, from what each answer grew by."""
    merged = [
        Delta(
            choice=grown[-1].choice,
            text="".join(d.text for d in grown),
            tokens=[t for d in grown for t in d.tokens],
            logprobs=[p for d in grown for p in d.logprobs],
            finish_reason=grown[-1].finish_reason,
        )
        for _, grown in sorted(parts.items())
    ]
    written = [form.choice(delta, streamed=False) for delta in merged]
    return msgspec.json.encode(form.reply(written, streamed=False, usage=True))


async def _stream(service: Service, request: web.Request, choices: list[Choice], form: _Form) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)

    async def event(data: bytes) -> None:
        await response.write(b"data: " + data + b"\n\n")

    try:
        async with aclosing(_deltas(service, choices)) as deltas:
            async for delta in deltas:
                written = [form.choice(delta, streamed=True)]
                await event(msgspec.json.encode(form.reply(written, streamed=True, usage=False)))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # the status is sent already: the stream itself must say it
        await event(msgspec.json.encode({"error": {"message": str(error), "type": type(error).__name__}}))
    else:
        if form.include_usage:
            await event(msgspec.json.encode(form.reply([], streamed=True, usage=True)))
        await event(b"[DONE]")
    await response.write_eof()
    return response
