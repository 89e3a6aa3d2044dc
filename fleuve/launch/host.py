"""Who starts processes: this machine (`LOCAL`), or a cluster. What the rest of the launch room knows of a process is
`Process`, wherever it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from fleuve.config.launching import require_ray
from fleuve.config.settings import Settings
from fleuve.launch.placement import Placement
from fleuve.launch.process import ChildError, ChildProcess
from fleuve.types import WeightFile


class Process(Protocol):
    """One process of a run: `python -m module '<options as JSON>'`. Of this machine: `process.ChildProcess`."""

    @property
    def name(self) -> str: ...

    @property
    def log_path(self) -> Path:
        """Its log, on this machine."""

    @property
    def url(self) -> str:
        """Of its server."""

    @property
    def token(self) -> str | None:
        """What its server wants to be shown."""

    @property
    def pid(self) -> int:
        """On the machine that it runs on."""

    @property
    def alive(self) -> bool: ...

    @property
    def ending(self) -> str:
        """What it has come to, in a few words; empty while it lives."""

    async def wait(self) -> int:
        """The exit status, negative for a signal; waits for the end."""

    async def died(self) -> ChildError:
        """Waits until it ends without having been told to, and returns the error that says so."""

    async def stop(self, grace: float = 5.0) -> int:
        """SIGTERM, then after `grace` seconds SIGKILL, for it and all that it started."""

    def kill(self) -> None:
        """SIGKILL for it and all that it started, at once; may be called again, and after it has ended."""


class Host(Protocol):
    """Starts processes by name. The names are those of the plan: `trainer`, `worker-0`, …; others find a place too."""

    async def start(
        self,
        name: str,
        module: str,
        options: Mapping[str, Any],
        log_path: Path,
        *,
        cpus: Collection[int] | None = None,
        threads: int = 1,
        start_timeout: float = 180.0,
    ) -> Process:
        """A process whose server answers.

        Raises:
            ChildError: it died before it answered, did not answer within `start_timeout` seconds, or has no place.
        """

    async def deliver(self, weights: WeightFile, process: Process) -> None:
        """See to it that `process` finds `weights` at their path. Call it before the process is told to read them.

        Raises:
            RolloutError: they cannot be brought to where it runs.
        """


class HostLostError(RuntimeError):
    """What the processes of a run are on is lost, and they with it. One line; what else went wrong comes of it."""


class LocalHost:
    """Every process is a child of this one."""

    async def start(
        self,
        name: str,
        module: str,
        options: Mapping[str, Any],
        log_path: Path,
        *,
        cpus: Collection[int] | None = None,
        threads: int = 1,
        start_timeout: float = 180.0,
    ) -> Process:
        return await ChildProcess.start(
            name, module, options, log_path, cpus=cpus, threads=threads, start_timeout=start_timeout
        )

    async def deliver(self, weights: WeightFile, process: Process) -> None:
        """They are there: one machine has one file system."""


LOCAL = LocalHost()


async def stop_all(processes: Collection[Process], grace: float = 5.0) -> None:
    """Stop them side by side, so that the end of a run takes as long as its slowest process and not the sum."""
    await asyncio.gather(*(process.stop(grace) for process in processes))


@asynccontextmanager
async def open_host(
    settings: Settings, logs: Path, weights: Path, placement: Placement, note: Callable[[str], None]
) -> AsyncIterator[Host]:
    """The host that `launch.backend` names, for a run that logs to `logs` and publishes in `weights`.

    Raises:
        UserError: it cannot be had.
    """
    if settings.launch.backend == "local":
        yield LOCAL
        return
    require_ray()
    from fleuve.launch.ray_host import open_ray_host

    async with open_ray_host(settings, logs, weights, placement) as (host, about):
        note(about)
        yield host
