"""The rollout workers' processes, on which things go wrong, and the supervisor that ends and starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fleuve.contracts import RolloutError
from fleuve.simulate.faults import NOTICED_WITHIN, Case, Chance, WorkerFault
from fleuve.simulate.faulty_engine import FaultyEngine
from fleuve.simulate.faulty_progress import ContinuingFaultyEngine
from fleuve.simulate.ledger import Ledger
from fleuve.simulate.tries import ViolationError


class FaultyWorkers:
    """The workers' processes, and the `contracts.Supervisor` over them."""

    def __init__(self, case: Case, ledger: Ledger, version: int) -> None:
        self._case = case
        self._ledger = ledger
        self._version = version
        self._chances = {f"worker-{i}": Chance(case, f"worker-{i} from {version}") for i in range(case.workers)}
        fails_at = dict([case.failing_update]) if case.failing_update and version == 0 else {}
        self.engines = {
            name: self._engine(name, chance, fails_at.get(index, -1))
            for index, (name, chance) in enumerate(self._chances.items())
        }
        self._leaving: dict[str, str] = {}
        self.complaint: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """What the controller has not done."""
        self.gone: list[FaultyEngine] = []
        call_later: Callable[..., asyncio.TimerHandle] = asyncio.get_running_loop().call_later
        faults = case.worker_faults if version == 0 else ()
        self._timers = [call_later(fault.at, self._strike, fault) for fault in faults]

    def _engine(self, name: str, chance: Chance, fails_at: int = -1) -> FaultyEngine:
        kind = ContinuingFaultyEngine if self._case.continues else FaultyEngine
        return kind(name, self._case, self._ledger, self._version, chance, fails_at)

    def close(self) -> None:
        """No more faults."""
        for timer in self._timers:
            timer.cancel()
        for engine in self.engines.values():
            engine.over = True

    def _strike(self, fault: WorkerFault) -> None:
        engine = self.engines[f"worker-{fault.worker}"]
        if engine in self.gone:
            return
        engine.strike(fault)
        if fault.kind in ("hang", "away"):
            self._timers.append(asyncio.get_running_loop().call_later(fault.seconds, self._mend, engine))

        if fault.kind == "hang" and fault.seconds > NOTICED_WITHIN and self._case.supervised:
            self._timers.append(asyncio.get_running_loop().call_later(NOTICED_WITHIN, self._is_noticed, engine))

    def _is_noticed(self, engine: FaultyEngine) -> None:
        if engine.hangs and engine not in self.gone and not self.complaint.done():
            self.complaint.set_result(f"{engine.name} has hung for {NOTICED_WITHIN:g} s, and is not given up")

    def _mend(self, engine: FaultyEngine) -> None:
        if engine not in self.gone:
            engine.mend()

    def is_wrong(self, worker: str) -> bool:
        """Whether something has gone wrong with it."""
        return worker in self.engines and bool(self.engines[worker].wrong)

    def remove(self, worker: str, how: str) -> None:
        """It is to leave, or whatever is started under its name."""
        self._leaving[worker] = how
        if worker in self.engines:
            self.engines[worker].removed = how

    async def kill(self, worker: str) -> str:
        """End it; see `contracts.Supervisor`."""
        await self._chance(worker).turns()
        self._ledger.event("killed", worker)
        engine = self.engines.get(worker)
        if engine is None or engine in self.gone:
            return "was not there"
        if not engine.wrong and not engine.removed:
            raise ViolationError(f"{worker} is killed, with which nothing is wrong")
        if engine.removed == "remove" and engine.busy and not engine.wrong:
            raise ViolationError(f"{worker} is killed, which was to end its answers before it leaves")
        engine.end()
        self.gone.append(engine)
        return "killed"

    async def start(self, worker: str) -> FaultyEngine:
        """A fresh one; see `contracts.Supervisor`."""
        if worker in self.engines and self.engines[worker] not in self.gone:
            raise ViolationError(f"{worker} is started, and there already")
        chance = self._chance(worker)
        await asyncio.sleep(chance.seconds(self._case.start_seconds))
        if chance.happens(self._case.rates.no_start):
            self._ledger.saw("not started")
            raise RolloutError(f"{worker} did not start: no memory")
        self._ledger.event("started", worker)
        self.engines[worker] = self._engine(worker, chance)
        self.engines[worker].removed = self._leaving.get(worker, "")
        return self.engines[worker]

    def _chance(self, worker: str) -> Chance:
        if worker not in self._chances:
            self._chances[worker] = Chance(self._case, f"{worker} from {self._version}")
        return self._chances[worker]
