"""The reference for `simulate.engine`: a rollout engine that takes one decode step after the other, on plain lists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fleuve.simulate.engine import EngineTimes
from fleuve.types import Completion, GenerationRequest, Interrupt, WeightFile, WeightUpdate


@dataclass(eq=False)
class Item:
    request: GenerationRequest
    reply: asyncio.Future[Completion]
    length: int
    natural: int
    versions: list[int] = field(default_factory=list)
    cached: int = 0  # of prompt and output
    seated: bool = False
    interruptions: int = 0

    @property
    def tokens(self) -> int:
        return len(self.request.input_ids) + len(self.versions)


class NaiveEngine:
    """`run` must be running."""

    def __init__(
        self, times: EngineTimes, lengths: Callable[[GenerationRequest], int], admit_room: int, preempt_room: int
    ) -> None:
        self.times, self.lengths = times, lengths
        self.admit_room, self.preempt_room = admit_room, preempt_room
        self.version = 0
        self.items: list[Item] = []  # oldest first
        self.updates: list[tuple[WeightFile, Interrupt, asyncio.Future[WeightUpdate]]] = []
        self.leaving: list[Item] = []
        self.paused = False
        self.preemptions = 0
        self.recomputed = 0
        self.prefilled = 0
        self.tokens = 0
        self.news = asyncio.Event()

    @property
    def seated(self) -> list[Item]:
        return [i for i in self.items if i.seated]

    async def generate(self, request: GenerationRequest) -> Completion:
        natural = self.lengths(request)
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        item = Item(request, reply, min(natural, request.sampling.max_new_tokens), natural)
        self.items.append(item)
        self.news.set()
        try:
            return await reply
        except asyncio.CancelledError:
            self.leaving.append(item)
            self.news.set()
            raise

    async def update_weights(self, weights: WeightFile, interrupt: Interrupt) -> WeightUpdate:
        reply: asyncio.Future[WeightUpdate] = asyncio.get_running_loop().create_future()
        self.updates.append((weights, interrupt, reply))
        self.news.set()
        return await reply

    async def abort(self, request_ids: Sequence[str]) -> None:
        found = [i for i in self.items if i.request.request_id in request_ids]
        self.leaving += found
        self.news.set()
        await asyncio.gather(*(i.reply for i in found), return_exceptions=True)

    async def pause(self) -> None:
        self.paused = True
        self.news.set()

    async def resume(self) -> None:
        self.paused = False
        self.news.set()

    async def run(self) -> None:
        while True:
            await self.news.wait()
            self.news.clear()
            while await self.turn():
                pass

    async def turn(self) -> bool:
        """One phase; False if there is nothing to do until there is news."""
        for item in self.leaving:
            if item in self.items:
                self.end(item, "abort")
        self.leaving.clear()
        while self.updates and self.updates[0][0].version <= self.version:
            self.updates.pop(0)[2].set_result(WeightUpdate(version=self.version, interrupted=0, seconds=0.0))
        finishing = False
        if self.updates:
            weights, interrupt, reply = self.updates[0]
            finishing = interrupt == "finish" and any(i.seated or i.versions for i in self.items)
            if not finishing:
                await asyncio.sleep(self.times.update_seconds())
                self.updates.pop(0)
                self.version = weights.version
                met = [i for i in self.items if i.seated or i.versions]
                for item in met:
                    item.interruptions += 1
                    if interrupt != "keep":
                        item.cached = 0
                reply.set_result(
                    WeightUpdate(version=self.version, interrupted=len(met), seconds=self.times.update_seconds())
                )
                return True
        if self.paused:
            return False
        if await self.prefill(admit_new=not self.updates):
            return True
        if not self.seated:
            return False
        if self.kv() + len(self.seated) > self.times.kv_capacity_tokens:
            while (
                len(self.seated) > 1
                and self.kv() + len(self.seated) * self.preempt_room > self.times.kv_capacity_tokens
            ):
                youngest = self.seated[-1]
                youngest.seated, youngest.cached = False, 0
                self.preemptions += 1
        base, per_kv = self.times.decode(len(self.seated))
        await asyncio.sleep(base + per_kv * self.kv())
        for item in self.seated:
            item.versions.append(self.version)
            item.cached += 1
            self.tokens += 1
            if len(item.versions) == item.length:
                self.end(item, "stop" if item.natural <= item.length else "length")
        return True

    def kv(self) -> int:
        return sum(i.cached for i in self.seated)

    async def prefill(self, admit_new: bool) -> bool:
        tokens, pairs, fresh = 0, 0.0, 0
        prompts: set[int] = {id(i.request.input_ids) for i in self.seated if i.cached}
        todo = [i for i in self.seated if not i.cached]
        for item in self.items:
            if item.seated:
                continue
            now = sum(i.tokens for i in self.seated)
            fits = now + item.tokens + (len(self.seated) + 1) * self.admit_room <= self.times.kv_capacity_tokens
            if len(self.seated) >= self.times.max_running or (self.seated and not fits):
                break
            if not admit_new and not item.versions:
                break
            item.seated = True
            fresh += not item.interruptions and not item.versions
            todo.append(item)
        for item in todo:
            shared = len(item.request.input_ids) if id(item.request.input_ids) in prompts else 0
            prompts.add(id(item.request.input_ids))
            tokens += item.tokens - shared
            pairs += (item.tokens**2 - shared**2) / 2
            if item.interruptions or item.versions:
                self.recomputed += item.tokens - shared
            item.cached = item.tokens
        self.prefilled += tokens
        if not tokens and not fresh:
            return False
        await asyncio.sleep(self.times.prefill_seconds(tokens, pairs, fresh))
        return True

    def end(self, item: Item, reason: str) -> None:
        self.items.remove(item)
        item.seated = False
        if not item.reply.done():
            n = len(item.versions)
            item.reply.set_result(
                Completion(
                    request_id=item.request.request_id,
                    output_ids=[0] * n,
                    logprobs=[0.0] * n,
                    versions=item.versions,
                    finish_reason=reason,  # type: ignore[arg-type]
                    interruptions=item.interruptions,
                )
            )
