"""An answer on its way through a vLLM server: in one piece or several, each token with its version. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fleuve.rollout.vllm_wire import Choice, Span, WireError, tokens_of, versions_of
from fleuve.types import Completion, FinishReason, GenerationRequest, Progress


class StopWatch(Protocol):
    """Finds stop strings: `engine.detokenizer.Detokenizer`."""

    stopped: bool

    def push(self, token: int) -> None:
        """One more token."""


@dataclass(eq=False)
class Piece:
    """What one request to the server gives of an answer. `version` is what the server sampled with when it was sent."""

    wire_id: str
    version: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    certain: int | None = None
    """So many of its tokens are of `version`, and of the others it is not known yet; None: all are."""
    cut: bool = False
    """An update has ended it; the answer goes on in another."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """The server has the request."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The stream is not to be waited for any more: what has come of it is all."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The stream is over, well or badly."""


@dataclass(eq=False)
class Flight:
    """One answer: `ids`, `logprobs` and `versions` are those of the pieces that have ended, `[tokens]`."""

    request: GenerationRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    piece: Piece | None = None
    interruptions: int = 0
    finish: FinishReason | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    watch: StopWatch | None = None

    @property
    def begun(self) -> list[int]:
        """The tokens that the next piece goes on behind."""
        return [*self.request.output_ids, *self.ids]

    @property
    def has_tokens(self) -> bool:
        """Whether any has come that this engine has sampled."""
        return bool(self.ids) or (self.piece is not None and bool(self.piece.ids))

    def board(self, wire_id: str, version: int, watch: Callable[[GenerationRequest], StopWatch | None]) -> Piece:
        """The next piece. A stop string may begin in one piece and end in the next, and each request to the server
        looks at its own tokens alone: from the second piece on, `watch` finds it here."""
        if self.begun and self.request.sampling.stop and self.watch is None:
            self.watch = watch(self.request)
            if self.watch is not None:
                for token in self.begun:
                    self.watch.push(token)
        self.piece = Piece(wire_id, version)
        return self.piece

    def take(self, choice: Choice) -> bool:
        """The next tokens of the piece; whether the answer has ended with one of them, without the server's knowing.

        Raises:
            WireError: they cannot be.
        """
        assert self.piece is not None
        for token, logprob in zip(*tokens_of(choice), strict=True):
            if self.watch is not None and self.watch.stopped:
                break  # behind the stop string
            self.piece.ids.append(token)
            # To be sampled greedily is to be sampled from all of one token.
            self.piece.logprobs.append(logprob if self.request.sampling.temperature > 0 else 0.0)
            if self.watch is not None:
                self.watch.push(token)
        return self.watch is not None and self.watch.stopped

    def close(self, reason: str, spans: Sequence[Span] | None, initial: int, by_spans: bool) -> None:
        """The stream of the piece has ended by `reason`: the answer has as well, unless an update has cut it.

        `spans` are the server's, of all its tokens. Without `by_spans`, versions are that of the piece, which has met
        no update.

        Raises:
            WireError: the end or the versions cannot be.
        """
        piece = self.piece
        assert piece is not None
        count = len(piece.ids)
        versions = [piece.version] * count
        if by_spans:
            total = max((span.end for span in spans or ()), default=0)
            versions = versions_of(spans, max(total, count), initial)[:count]  # less what is behind a stop string
        if reason not in ("stop", "length", "abort"):
            raise WireError(f"the answer ended with {reason!r}")
        self._land(piece, count, versions)
        if self.watch is not None and self.watch.stopped:
            self.finish = "stop"
        elif reason == "abort" and piece.cut and not self.aborted.is_set():
            self._go_on()
        else:
            self.finish = reason  # type: ignore[assignment]

    def leave(self) -> None:
        """The stream of the piece is not waited for: of what has come, that is taken whose version is certain."""
        piece = self.piece
        assert piece is not None
        count = len(piece.ids) if piece.certain is None else piece.certain
        self._land(piece, count, [piece.version] * count)
        if self.watch is not None and self.watch.stopped:
            self.finish = "stop"
        elif piece.cut and not self.aborted.is_set():
            self._go_on()
        else:
            self.finish = "abort"

    def _land(self, piece: Piece, count: int, versions: list[int]) -> None:
        self.ids += piece.ids[:count]
        self.logprobs += piece.logprobs[:count]
        self.versions += versions
        self.piece = None

    def _go_on(self) -> None:
        if len(self.begun) >= self.request.sampling.max_new_tokens:
            self.finish = "length"

    def cut(self) -> None:
        """An update comes, and the server is told to end what it has."""
        if self.piece is not None:
            self.piece.cut = True

    def meet_update(self) -> bool:
        """New weights are in, and nothing has been sampled by them yet; whether this answer had begun, and goes on."""
        piece = self.piece
        if piece is not None and not piece.ended.is_set() and piece.certain is None:
            piece.certain = len(piece.ids)  # what comes from now on may have been sampled before
        met = self.finish is None and self.has_tokens
        self.interruptions += met
        return met

    def completion(self) -> Completion:
        """The answer, which has ended."""
        assert self.finish is not None
        return Completion(
            request_id=self.request.request_id,
            output_ids=self.ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=self.finish,
            interruptions=self.interruptions,
        )

    def progress(self, known: int) -> Progress:
        """What has come beyond `known` tokens, as far as their versions are certain."""
        ids, logprobs, versions = list(self.ids), list(self.logprobs), list(self.versions)
        if (piece := self.piece) is not None:
            count = len(piece.ids) if piece.certain is None else piece.certain
            ids += piece.ids[:count]
            logprobs += piece.logprobs[:count]
            versions += [piece.version] * count
        return Progress(
            request_id=self.request.request_id,
            start=known,
            output_ids=np.asarray(ids[known:], np.int32),
            logprobs=np.asarray(logprobs[known:], np.float32),
            versions=np.asarray(versions[known:], np.int32),
        )


def detokenizer_of(load: Callable[[], Any]) -> Callable[[GenerationRequest], StopWatch | None]:
    """Makes watches for stop strings; `load` opens the tokenizer, when the first is needed."""
    tokenizer: list[Any] = []

    def watch(request: GenerationRequest) -> StopWatch:
        from fleuve.engine.detokenizer import Detokenizer

        if not tokenizer:
            tokenizer.append(load())
        return Detokenizer(tokenizer[0], request.input_ids, request.sampling.stop)

    return watch
