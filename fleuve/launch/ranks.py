"""A trainer of several ranks: a process each, one `Process` to whoever supervises it.

Rank 0 is the trainer to the outside. It says where they meet, which the others are told here: it is in no command
line, which all accounts of a machine could read. They live and die together: one that is lost is the loss of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleuve.config.settings import Settings
from fleuve.contracts import TrainerError
from fleuve.launch.host import Host, Process
from fleuve.launch.placement import Place
from fleuve.launch.process import ChildError
from fleuve.train.client import TrainerClient

LOOK = 0.05
"""Seconds between two looks at a trainer that is starting."""


class TrainerRanks:
    """Implements `host.Process`."""

    def __init__(self, first: Process, others: Sequence[Process], patience: float) -> None:
        self.members = [first, *others]
        """Rank by rank."""
        self._first = first
        self._patience = patience

    @property
    def name(self) -> str:
        return self._first.name

    @property
    def log_path(self) -> Path:
        return self._first.log_path

    @property
    def url(self) -> str:
        return self._first.url

    @property
    def token(self) -> str | None:
        return self._first.token

    @property
    def pid(self) -> int:
        return self._first.pid

    @property
    def alive(self) -> bool:
        """Whether all ranks live."""
        return all(member.alive for member in self.members)

    @property
    def ending(self) -> str:
        """Of the first rank that has ended."""
        return next((f"{m.name}: {m.ending}" for m in self.members if not m.alive), "")

    async def wait(self) -> int:
        """Rank 0's exit status, once all have ended."""
        status, *_ = await asyncio.gather(*(member.wait() for member in self.members))
        return status

    async def died(self) -> ChildError:
        """The first rank that dies, or gives no sign of life for the patience there is."""
        deaths = [member.died() for member in self.members]
        silences = [self._silence_of(member) for member in self.members[1:]]
        found: ChildError = await first_of([*deaths, *silences])
        return found

    async def stop(self, grace: float = 5.0) -> int:
        """Rank 0 ends the step in progress for all; then the others are killed."""
        status = await self._first.stop(grace)
        await asyncio.gather(*(member.stop(0.0) for member in self.members[1:]))
        return status

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    async def _silence_of(self, member: Process) -> ChildError:
        async with TrainerClient(member.url, self._patience, member.token) as client:
            while True:
                await asyncio.sleep(self._patience / 4)
                try:
                    await client.health(self._patience)
                except TrainerError as error:
                    if member.alive:
                        return ChildError(member.name, f"hangs: {error}", member.log_path)
                    await asyncio.Event().wait()  # its death says more


async def start_ranks(
    settings: Settings, options: Mapping[str, Any], logs: Path, spots: Sequence[Place], host: Host
) -> Process:
    """The ranks, one for each of `spots`, once all are ready. They log to `trainer.log`, `trainer-1.log`, …

    Raises:
        ChildError: one did not come up.
    """
    timeout = settings.trainer.start_timeout
    members: list[Process] = []

    async def start_one(rank: int) -> Process:
        name = f"trainer-{rank}" if rank else "trainer"
        spot = spots[rank]
        process = await host.start(
            name,
            "fleuve.train",
            {**options, "rank": rank, "threads": spot.threads},
            logs / f"{name}.log",
            cpus=spot.cpus,
            threads=spot.threads,
            start_timeout=timeout,
        )
        members.append(process)
        return process

    async def start_all() -> Process:
        coming = [asyncio.ensure_future(start_one(rank)) for rank in range(len(spots))]
        try:
            first, *others = await asyncio.gather(*coming)
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)
        whole = TrainerRanks(first, others, settings.trainer.health_timeout)
        death = await first_of([_meet(first, others, timeout), whole.died()])
        if death is not None:
            raise death
        return whole

    try:
        async with asyncio.timeout(timeout):
            return await start_all()
    except TimeoutError:
        await _end(members)
        log = logs / "trainer.log"
        raise ChildError("trainer", f"was not ready within {timeout:g} s, with its ranks", log) from None
    except TrainerError as error:
        await _end(members)
        raise ChildError("trainer", f"did not come up: {error}", logs / "trainer.log") from error
    except BaseException:
        await _end(members)
        raise


async def first_of(waits: Sequence[Any]) -> Any:
    """What the first of several awaitables to end returns; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _meet(first: Process, others: Sequence[Process], timeout: float) -> None:
    """Tell the others where the first one waits for them; returns when all are ready."""
    async with TrainerClient(first.url, timeout, first.token) as leader:
        meeting = (await leader.health(timeout)).get("meeting")
        for other in others:
            async with TrainerClient(other.url, timeout, other.token) as client:
                await client.meet(meeting or {})
        while True:
            if (await leader.health(timeout)).get("busy") != "starting":
                return
            await asyncio.sleep(LOOK)


async def _end(members: Sequence[Process]) -> None:
    await asyncio.gather(*(member.stop(0.0) for member in members))
