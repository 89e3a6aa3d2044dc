"""How each kind of engine is started, or spoken to where it runs already. A new kind is one class and a row below."""

from __future__ import annotations

import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from subject import Promise

from fleuve.config.settings import RolloutSettings
from fleuve.contracts import RolloutEngine
from fleuve.launch.engines import start_engine
from fleuve.launch.kinds import KINDS as ENGINES
from fleuve.launch.placement import available_cpus
from fleuve.rollout.client import EngineClient

PATIENCE = 120.0
"""Seconds for any call; the tests have shorter limits of their own where it matters."""


@dataclass(frozen=True)
class Start:
    """`url` is given where the engine runs already. `weights` is the directory that it reads new ones from."""

    url: str | None
    token: str | None
    model: str
    dtype: str
    device: str
    weights: Path
    logs: Path


class Kind(Protocol):
    def promise(self, start: Start) -> Promise:
        """What the tests hold it to, when the command line does not say."""

    async def open(self, start: Start, stack: AsyncExitStack) -> RolloutEngine:
        """A client of it; `stack` ends what had to be started."""


class Embedded:
    """`python -m fleuve.engine`, in a process of its own."""

    def promise(self, start: Start) -> Promise:
        if start.dtype == "bfloat16":
            return Promise(mean=0.05, worst=1.0)
        return Promise() if start.device == "cpu" else Promise(mean=1e-4, worst=1e-3)

    async def open(self, start: Start, stack: AsyncExitStack) -> RolloutEngine:
        url, token = start.url, start.token
        if url is None:
            rollout = RolloutSettings(
                dtype=start.dtype,  # type: ignore[arg-type]
                device=start.device,  # type: ignore[arg-type]
                max_running=48,  # fewer than the load test asks for: some have to wait
                kv_cache_tokens=16384,
            )
            log = start.logs / "engine.log"
            child = await start_engine("engine", start.model, rollout, log, threads=1, weights=start.weights)
            stack.push_async_callback(child.stop)
            url, token = child.url, child.token
        return await stack.enter_async_context(EngineClient("engine", url, PATIENCE, PATIENCE, token))


class VLLM:
    """Through `fleuve.rollout.vllm`."""

    def promise(self, start: Start) -> Promise:
        if start.dtype == "bfloat16":
            return Promise(mean=0.1, worst=2.0, lacks=frozenset({"same-seed", "seeded-order"}))
        return Promise(mean=1e-3, worst=1e-2, lacks=frozenset({"seeded-order"}))

    async def open(self, start: Start, stack: AsyncExitStack) -> RolloutEngine:
        rollout = RolloutSettings(
            engine="vllm",
            dtype=start.dtype,  # type: ignore[arg-type]
            device=start.device,  # type: ignore[arg-type]
            max_running=48,
            kv_cache_tokens=16384,
        )
        url, token = start.url, start.token
        if url is None:
            if shutil.which(rollout.vllm.python) is None:
                pytest.skip("there is no vLLM here: `make vllm` sets it up")
            log = start.logs / "vllm.log"
            cpus = available_cpus()[-1:]
            child = await start_engine("engine", start.model, rollout, log, threads=1, cpus=cpus, weights=start.weights)
            stack.push_async_callback(child.stop)
            url, token = child.url, child.token
        engine = ENGINES["vllm"].client("engine", url, token, start.model, rollout, PATIENCE)
        return await stack.enter_async_context(engine)


KINDS: dict[str, Kind] = {"embedded": Embedded(), "vllm": VLLM()}
