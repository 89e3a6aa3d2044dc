"""Scores answers in killable processes, so that no verifier can hang, crash or block the run.

A check that is over its deadline has its process killed and replaced; the checks beside it notice nothing. What a
verifier fails at for reasons of its own is a verdict without score, never a zero (design, invariant 8). Any of the
processes may be killed at any time: its check goes to another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from fleuve.config.settings import RewardSettings
from fleuve.rewards.code.options import CodeOptions
from fleuve.rewards.door import Door
from fleuve.rewards.nursery import Nursery
from fleuve.rewards.process import CrashError, DeadlineError, KilledError, LostError, VerifierProcess
from fleuve.rewards.protocol import Check, Result, WorkerOptions
from fleuve.rewards.tally import Tally
from fleuve.rewards.weighted import names
from fleuve.types import Prompt, Verdict

ATTEMPTS = 2
"""Processes that a check may crash before it is given up: the first crash may have been another's doing."""
LOSSES = 8
"""Processes that may be gone before they take a check up: never the check's doing, but it has to end."""
STARTS = 3
"""Times that a process is started which a signal ends meanwhile."""
_CPU_MARGIN = 10.0
_RESTART_PAUSE = (0.0, 0.5, 2.0, 8.0, 30.0)

T = TypeVar("T")


class RewardPool:
    """`settings.workers` warm verifier processes; implements `contracts.Rewarder`.

    >>> async with RewardPool(settings.reward, verifiers=["math"]) as pool:
    ...     verdict = await pool.score(prompt, text)
    """

    def __init__(
        self, settings: RewardSettings, verifiers: Sequence[str] = ("math",), log_path: Path | None = None
    ) -> None:
        """`verifiers` are loaded once, at the start; others by each process at their first check. `log_path` gets what
        user code prints."""
        self._settings = settings
        self._log_path = log_path
        self._options = WorkerOptions(
            verifiers=names(verifiers),
            cpu_seconds=settings.deadline + _CPU_MARGIN,
            memory=int(settings.memory_gb * 2**30),
            path=settings.path,
            code=CodeOptions(**settings.code.model_dump(), deadline=settings.deadline),
        )
        self._nursery: Nursery | None = None
        self._nursing = asyncio.Lock()
        self._workers: set[VerifierProcess] = set()
        self._door = Door(settings.queue_size, int(settings.queue_mb * 2**20))
        # None wakes those who wait when there is nothing left to wait for.
        self._idle: asyncio.Queue[VerifierProcess | None] = asyncio.Queue()
        self._restarts: set[asyncio.Task[None]] = set()
        self._renewals: set[asyncio.Task[Nursery]] = set()
        self._stuck: set[VerifierProcess] = set()
        self._start_failure = ""
        self._failed_starts = 0
        self._closed = False
        self._tally = Tally()

    async def __aenter__(self) -> RewardPool:
        """Starts the processes.

        Raises:
            UserError: a verifier cannot be loaded.
            CrashError: a process died while starting (by a signal: `STARTS` times), or was not ready within
                `start_timeout`.
        """
        starts = [asyncio.create_task(_again_if_killed(self._start)) for _ in range(self._settings.workers)]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self._end_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end_all()

    @property
    def pids(self) -> list[int]:
        """The verifier processes alive now."""
        return [worker.pid for worker in self._workers]

    @property
    def nursery_pid(self) -> int | None:
        """The process that they are forked from; None while there is none."""
        return self._nursery.pid if self._nursery is not None and self._nursery.alive else None

    async def score(self, prompt: Prompt, text: str) -> Verdict:
        """One answer's verdict. Its deadline starts when a process takes it up, however long it waited for one."""
        arrived = asyncio.get_running_loop().time()
        # Lone surrogates can come out of JSON escapes, and have no UTF-8.
        text = text.encode(errors="replace").decode()
        if not await self._door.enter(len(text), arrived + self._settings.queue_timeout):
            reason = f"the queue of verifier processes was full for {self._settings.queue_timeout:g} s"
            return self._no_verdict("queue", reason, 0.0)
        try:
            return await self._score(prompt, text, arrived)
        finally:
            self._door.leave(len(text))

    @property
    def able(self) -> bool:
        """Whether checks can be expected to end in verdicts: processes are alive, or can be started."""
        return not self._closed and not self._hopeless

    def metrics(self) -> dict[str, float]:
        """`reward_service/...`: counts since the start, seconds of the latest checks, processes and checks now."""
        return {
            **self._tally.metrics(),
            "reward_service/workers": float(sum(worker.alive for worker in self._workers)),
            "reward_service/queued": float(self._door.inside + self._door.outside),
        }

    async def _score(self, prompt: Prompt, text: str, arrived: float) -> Verdict:
        loop = asyncio.get_running_loop()
        until = arrived + self._settings.queue_timeout
        check = Check(verifier=prompt.verifier, text=text, answer=prompt.answer, row=prompt.row)
        crashes = losses = 0
        while True:
            worker = await self._take(until)
            if worker is None:
                return self._nobody_free()
            started = loop.time()
            try:
                result = await worker.check(check, self._settings.deadline)
            except DeadlineError:
                self._replace(worker)
                reason = f"verifier {prompt.verifier!r} was over its deadline of {self._settings.deadline:g} s"
                return self._no_verdict("timeout", reason, loop.time() - started)
            except LostError as error:
                self._replace(worker)
                losses += 1
                if losses == LOSSES:
                    reason = f"{LOSSES} verifier processes in a row were gone before they took it up: {error}"
                    return self._no_verdict("crash", reason, 0.0)
            except CrashError as error:
                self._replace(worker)
                crashes += 1
                if crashes == ATTEMPTS:
                    reason = f"verifier {prompt.verifier!r} crashed its process {ATTEMPTS} times: {error}"
                    return self._no_verdict("crash", reason, 0.0)
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                self._idle.put_nowait(worker)
                return self._no_verdict("error", f"row {prompt.id} cannot be sent to a verifier: {error}", 0.0)
            except BaseException:  # cancelled: the check goes on in there
                self._replace(worker)
                raise
            else:
                self._release(worker)
                return self._verdict(result, loop.time() - started, started - arrived)

    def _verdict(self, result: Result, seconds: float, queue_seconds: float) -> Verdict:
        self._tally.queued(queue_seconds)
        if result.score is None:
            return self._no_verdict("error", result.reason, seconds)
        self._tally.scored(seconds)
        return Verdict(score=result.score, seconds=seconds, queue_seconds=queue_seconds)

    def _no_verdict(self, kind: str, reason: str, seconds: float) -> Verdict:
        self._tally.no_verdict(kind, seconds)
        return Verdict(score=None, reason=reason, seconds=seconds, kind=kind)

    def _nobody_free(self) -> Verdict:
        if self._closed:
            return self._no_verdict("error", "the pool of verifier processes is closed", 0.0)
        if self._hopeless:
            return self._no_verdict("error", f"no verifier process can be started: {self._start_failure}", 0.0)
        why = f" (the last failed to start: {self._start_failure})" if self._start_failure else ""
        reason = f"no verifier process was free for {self._settings.queue_timeout:g} s{why}"
        return self._no_verdict("queue", reason, 0.0)

    async def _take(self, until: float) -> VerifierProcess | None:
        """An idle process, or None if there is none by the loop's time `until`, or will be none."""
        try:
            async with asyncio.timeout_at(until):
                while not self._closed:
                    worker = await self._idle.get()
                    if worker is None:
                        if self._hopeless or self._closed:
                            self._idle.put_nowait(None)  # for the next who waits
                            return None
                    elif worker.alive:
                        return worker
                    else:
                        self._replace(worker)  # it died while idle, which is no check's fault
        except TimeoutError:
            pass
        return None

    def _release(self, worker: VerifierProcess) -> None:
        """It is done with a check; one that has done many, has grown, or came from an earlier nursery makes room for a
        fresh one."""
        after, limit = self._settings.recycle_after, self._settings.recycle_mb * 2**20
        earlier = worker.orphaned() and self.nursery_pid is not None
        if (after and worker.checks >= after) or (limit and worker.memory > limit) or earlier:
            self._replace(worker, "recycled")
        else:
            self._idle.put_nowait(worker)

    def _replace(self, worker: VerifierProcess, why: str = "replaced") -> None:
        worker.kill()
        if self._closed:
            return
        self._tally.counts[why] += 1
        restart = asyncio.create_task(self._restart(worker))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    @property
    def _hopeless(self) -> bool:
        """No process is alive, and the attempts to start one have failed as often as they are made quickly."""
        return self._failed_starts >= len(_RESTART_PAUSE) and not any(worker.alive for worker in self._workers)

    async def _restart(self, worker: VerifierProcess) -> None:
        """Put a new process in the place of one that was killed. Never gives up and never raises: what goes wrong is
        the reason of the verdicts that wait for it."""
        try:
            await worker.end()
        except Exception as error:  # it does not go, be it killed; what comes after it need not wait for that
            self._stuck.add(worker)
            self._start_failure = f"process {worker.pid} was killed and has not ended: {error!r}"
        self._workers.discard(worker)
        attempt = 0
        while True:
            await asyncio.sleep(_RESTART_PAUSE[min(attempt, len(_RESTART_PAUSE) - 1)])
            try:
                await self._start()
            except Exception as error:
                self._start_failure = str(error) or repr(error)
                attempt += 1
                self._failed_starts += 1
                if self._hopeless and self._idle.empty():
                    self._idle.put_nowait(None)
            else:
                self._start_failure, self._failed_starts = "", 0
                return

    async def _start(self) -> None:
        nursery = await self._living_nursery()
        worker = await nursery.fork(self._settings.start_timeout)
        self._workers.add(worker)
        self._idle.put_nowait(worker)

    async def _living_nursery(self) -> Nursery:
        """The one there is, or a new one in the place of one that died."""
        async with self._nursing:
            if self._nursery is None or not self._nursery.alive:
                if self._nursery is not None:
                    await self._nursery.end()
                    self._nursery = None
                timeout = self._settings.start_timeout
                self._nursery = await _again_if_killed(lambda: Nursery.start(self._options, timeout, self._log_path))
                self._nursery.died.add_done_callback(lambda _: self._renew_nursery())
            return self._nursery

    def _renew_nursery(self) -> None:
        """It has died: have another one ready before it is needed."""
        if not self._closed:
            renewal = asyncio.create_task(self._living_nursery())
            self._renewals.add(renewal)
            renewal.add_done_callback(self._renewed)

    def _renewed(self, renewal: asyncio.Task[Nursery]) -> None:
        self._renewals.discard(renewal)
        if renewal.cancelled():
            return
        if (error := renewal.exception()) is not None:  # the next start tries again
            self._start_failure = str(error) or repr(error)
        elif not self._closed:
            self._replace_idle_orphans()

    def _replace_idle_orphans(self) -> None:
        """A worker that is stopped when this process dies is woken by its nursery's death, to read that it is to end
        (`launch.child.lifeline`). One that has lost its nursery before would stay for ever."""
        for _ in range(self._idle.qsize()):
            worker = self._idle.get_nowait()
            if worker is not None and worker.orphaned():
                self._replace(worker, "recycled" if worker.alive else "replaced")
            else:
                self._idle.put_nowait(worker)

    async def _end_all(self) -> None:
        self._closed = True
        self._idle.put_nowait(None)
        pending = [*self._restarts, *self._renewals]
        for task in pending:
            task.cancel()
        left = self._workers | self._stuck
        for worker in left:
            worker.kill()
        await asyncio.gather(*pending, *(worker.end() for worker in left), return_exceptions=True)
        self._workers.clear()
        self._stuck.clear()
        if self._nursery is not None:
            await self._nursery.end()


async def _again_if_killed(start: Callable[[], Awaitable[T]]) -> T:
    """What `start` brings; it is tried `STARTS` times where a signal ends what it starts."""
    for _ in range(STARTS - 1):
        with contextlib.suppress(KilledError):
            return await start()
    try:
        return await start()
    except KilledError as error:  # nobody tries this again
        raise CrashError(f"{error} ({STARTS} times in a row)") from None
