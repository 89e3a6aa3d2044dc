"""The rollout workers' processes: nothing is left of one that is killed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings
from pathlib import Path

import psutil

from fleuve.config.settings import Settings
from fleuve.launch import engines
from fleuve.launch.engines import EngineProcesses
from fleuve.launch.placement import Place
from fleuve.launch.process import ChildProcess

HERE = str(Path(__file__).parent)


async def light_engine(name: str, model: str, rollout: object, log_path: Path, **_: object) -> ChildProcess:
    """A process with a server, which loads no model."""
    return await ChildProcess.start(name, "launch_children", {"role": "serve"}, log_path, env={"PYTHONPATH": HERE})


async def test_a_killed_worker_leaves_neither_process_nor_connections_even_if_the_run_ends_meanwhile(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(engines, "start_engine", light_engine)
    settings = Settings.model_validate({"run_dir": "r", "model": {"path": "m"}, "data": {"train": "d"}})
    workers = EngineProcesses(settings, tmp_path, tmp_path, [Place(cpus=None, threads=1)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        await workers.open("worker-0")
        (child,) = workers.children
        os.kill(child.pid, signal.SIGSTOP)
        killing = asyncio.create_task(workers.kill("worker-0"))
        await asyncio.sleep(0.05)
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        await workers.close()
        async with asyncio.timeout(5):
            await child.wait()
        del killing
        gc.collect()
    assert not psutil.pid_exists(child.pid)
    assert [str(w.message) for w in caught if "client session" in str(w.message)] == []
