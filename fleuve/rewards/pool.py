"""Scores answers in killable processes, so that no verifier can hang, crash or block the run.

A check that is over its deadline has its process killed and replaced; the checks beside it notice nothing. What a
verifier fails at for reasons of its own is a verdict without score, never a zero (design, invariant 8).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from fleuve.config.settings import RewardSettings
from fleuve.rewards.code.options import CodeOptions
from fleuve.rewards.process import CrashError, DeadlineError, VerifierProcess
from fleuve.rewards.protocol import Check, Result, WorkerOptions
from fleuve.types import Prompt, Verdict

ATTEMPTS = 2
"""Processes that a check may crash before it is given up: the first crash may have been another's doing."""
_CPU_MARGIN = 10.0
_RESTART_PAUSE = (0.0, 0.5, 2.0, 8.0, 30.0)


class RewardPool:
    """`settings.workers` warm verifier processes; implements `contracts.Rewarder`.

    >>> async with RewardPool(settings.reward, verifiers=["math"]) as pool:
    ...     verdict = await pool.score(prompt, text)
    """

    def __init__(
        self, settings: RewardSettings, verifiers: Sequence[str] = ("math",), log_path: Path | None = None
    ) -> None:
        """`verifiers` are loaded when a process starts; others are at their first check. `log_path` gets what user code
        prints."""
        self._settings = settings
        self._log_path = log_path
        self._options = WorkerOptions(
            verifiers=tuple(dict.fromkeys(verifiers)),
            cpu_seconds=settings.deadline + _CPU_MARGIN,
            memory=int(settings.memory_gb * 2**30),
            path=settings.path,
            code=CodeOptions(**settings.code.model_dump(), deadline=settings.deadline),
        )
        self._workers: set[VerifierProcess] = set()
        # None wakes those who wait when there is nothing left to wait for.
        self._idle: asyncio.Queue[VerifierProcess | None] = asyncio.Queue()
        self._restarts: set[asyncio.Task[None]] = set()
        self._stuck: set[VerifierProcess] = set()
        self._start_failure = ""
        self._failed_starts = 0
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._check_seconds = self._queue_seconds = 0.0

    async def __aenter__(self) -> RewardPool:
        """Starts the processes.

        Raises:
            UserError: a verifier cannot be loaded.
            CrashError: a process died while starting or was not ready within `start_timeout`.
        """
        starts = [asyncio.create_task(self._start()) for _ in range(self._settings.workers)]
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
        """The processes alive now."""
        return [worker.pid for worker in self._workers]

    async def score(self, prompt: Prompt, text: str) -> Verdict:
        """One answer's verdict. Its deadline starts when a process takes it up, however long it waited for one."""
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        # Lone surrogates can come out of JSON escapes, and have no UTF-8.
        text = text.encode(errors="replace").decode()
        check = Check(verifier=prompt.verifier, text=text, answer=prompt.answer, row=prompt.row)
        crash = ""
        for _ in range(ATTEMPTS):
            if self._closed:
                return self._no_verdict("error", "the pool of verifier processes is closed", 0.0)
            worker = await self._take(arrived + self._settings.queue_timeout)
            if worker is None and self._hopeless:
                reason = f"no verifier process can be started: {self._start_failure}"
                return self._no_verdict("error", reason, 0.0)
            if worker is None:
                why = f" (the last failed to start: {self._start_failure})" if self._start_failure else ""
                return self._no_verdict(
                    "queue", f"no verifier process was free for {self._settings.queue_timeout:g} s{why}", 0.0
                )
            started = loop.time()
            self._queue_seconds += started - arrived
            try:
                result = await worker.check(check, self._settings.deadline)
            except DeadlineError:
                self._replace(worker)
                reason = f"verifier {prompt.verifier!r} was over its deadline of {self._settings.deadline:g} s"
                return self._no_verdict("timeout", reason, loop.time() - started)
            except CrashError as error:
                self._replace(worker)
                self._counts["crash"] += 1
                crash = f"verifier {prompt.verifier!r} crashed its process {ATTEMPTS} times: {error}"
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                self._idle.put_nowait(worker)
                return self._no_verdict("error", f"row {prompt.id} cannot be sent to a verifier: {error}", 0.0)
            except BaseException:  # cancelled: the check goes on in there
                self._replace(worker)
                raise
            else:
                self._idle.put_nowait(worker)
                return self._verdict(result, loop.time() - started)
        return self._no_verdict("crashed", crash, 0.0)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and mean seconds of a check and of waiting for a process."""
        checks = self._counts["scored"] + self._counts["error"] + self._counts["timeout"]
        return {
            "reward/scored": float(self._counts["scored"]),
            "reward/no_verdict": float(self._counts["no_verdict"]),
            "reward/timeouts": float(self._counts["timeout"]),
            "reward/crashes": float(self._counts["crash"]),
            "reward/errors": float(self._counts["error"]),
            "reward/check_seconds_mean": self._check_seconds / max(1, checks),
            "reward/queue_seconds_mean": self._queue_seconds / max(1, checks),
        }

    def _verdict(self, result: Result, seconds: float) -> Verdict:
        if result.score is None:
            return self._no_verdict("error", result.reason, seconds)
        self._counts["scored"] += 1
        self._check_seconds += seconds
        return Verdict(score=result.score, seconds=seconds)

    def _no_verdict(self, kind: str, reason: str, seconds: float) -> Verdict:
        self._counts[kind] += 1
        self._counts["no_verdict"] += 1
        self._check_seconds += seconds
        return Verdict(score=None, reason=reason, seconds=seconds)

    async def _take(self, until: float) -> VerifierProcess | None:
        """An idle process, or None if there is none by the loop's time `until`, or will be none."""
        try:
            async with asyncio.timeout_at(until):
                while True:
                    worker = await self._idle.get()
                    if worker is None:
                        if self._hopeless:
                            self._idle.put_nowait(None)  # for the next who waits
                            return None
                    elif worker.alive:
                        return worker
                    else:
                        self._replace(worker)  # it died while idle, which is no check's fault
        except TimeoutError:
            return None

    def _replace(self, worker: VerifierProcess) -> None:
        worker.kill()
        if self._closed:
            return
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
        worker = await VerifierProcess.start(self._options, self._settings.start_timeout, self._log_path)
        self._workers.add(worker)
        self._idle.put_nowait(worker)

    async def _end_all(self) -> None:
        self._closed = True
        for restart in list(self._restarts):
            restart.cancel()
        left = self._workers | self._stuck
        for worker in left:
            worker.kill()
        await asyncio.gather(*self._restarts, *(worker.end() for worker in left), return_exceptions=True)
        self._workers.clear()
        self._stuck.clear()
