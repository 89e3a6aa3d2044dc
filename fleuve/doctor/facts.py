"""What a node is like, as far as that can be told without torch; `gather` runs on each node of a cluster.

Whatever can hang or crash (a broken driver, a collective that waits for nobody) runs in `probe`, in a process of its
own with a deadline.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from fleuve.doctor.probe import Devices, Reduced, run_devices, run_reduction
from fleuve.launch.placement import available_cpus
from fleuve.weights.directory import shared_memory

PACKAGES = ("torch", "transformers", "ray", "numpy", "safetensors", "aiohttp")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CONNECT = 2.0
"""Seconds for a connection to oneself."""


class Request(msgspec.Struct, frozen=True):
    """What to look at. `disk` is where checkpoints go, `weights` where weights are published (None: shared memory);
    `sandbox` is what is asked of the walls around programs (None: no programs); `deadline` is that of each probe."""

    disk: str | None = None
    weights: str | None = None
    sandbox: str | None = None
    deadline: float = 90.0
    collectives: bool = True


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are bytes, times seconds. Where a string says what is wrong, it is empty if nothing is."""

    host: str
    wall: float
    """`time.time()` of the node."""
    python: tuple[int, int, int]
    packages: dict[str, str | None]
    cpus: int
    features: list[str]
    niceness: int
    memory: int
    open_files: int
    """As many as a process may ask for."""
    shared_place: str
    shared_free: int
    disk_place: str
    disk_free: int
    huge_pages: str
    """always, madvise, never; empty where the system has none."""
    sandbox: str | None
    """What walls cannot be had; None: not looked for."""
    loopback: str
    clock: str
    devices: Devices
    gloo: Reduced | None
    nccl: Reduced | None


def gather(request: Request) -> NodeFacts:
    """Of the node that this runs on. Takes as long as its probes: seconds, and at most three times their deadline."""
    devices = run_devices(request.deadline)
    count = len(devices.gpus)
    place = Path(request.weights) if request.weights is not None else shared_memory()
    disk = _existing(Path(request.disk or "."))
    return NodeFacts(
        host=socket.gethostname(),
        wall=time.time(),
        python=sys.version_info[:3],
        packages={name: version(name) for name in PACKAGES},
        cpus=len(available_cpus()),
        features=cpu_features(_read("/proc/cpuinfo")),
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
        memory=available_memory(_read("/proc/meminfo")),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        shared_place=str(place),
        shared_free=shutil.disk_usage(_existing(place)).free,
        disk_place=str(disk),
        disk_free=shutil.disk_usage(disk).free,
        huge_pages=chosen(_read(str(HUGE_PAGES))),
        sandbox=None if request.sandbox is None else _sandbox(request.sandbox),
        loopback=_loopback(),
        clock=_clock(),
        devices=devices,
        gloo=run_reduction("gloo", 2, request.deadline) if request.collectives else None,
        nccl=run_reduction("nccl", count, request.deadline) if request.collectives and count > 1 else None,
    )


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_features(cpuinfo: str) -> list[str]:
    """Which of the instruction sets that matter for bf16 `/proc/cpuinfo` names."""
    flags = next((line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    return [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]


def available_memory(meminfo: str) -> int:
    """Bytes, from `/proc/meminfo`; 0 if it does not say."""
    line = next((line for line in meminfo.splitlines() if line.startswith("MemAvailable:")), "")
    return int(line.split()[1]) * 1024 if line else 0


def chosen(choices: str) -> str:
    """Of `always [madvise] never` what stands in brackets."""
    return choices.partition("[")[2].partition("]")[0]


def _existing(path: Path) -> Path:
    """The nearest directory above that is there."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.is_dir())


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _sandbox(wanted: str) -> str:
    from fleuve.errors import UserError
    from fleuve.rewards.sandbox.level import choose

    try:
        choose(wanted, allow_weak=False)
    except UserError as error:
        return str(error)
    return ""


def _loopback() -> str:
    """What keeps this machine from speaking to itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(CONNECT)
            with socket.create_connection(server.getsockname(), CONNECT):
                server.accept()[0].close()
    except OSError as error:
        return str(error)
    return ""


def _clock(looks: int = 2000) -> str:
    """What is wrong with the monotonic clock, on which every deadline hangs: looked at from two threads."""
    backwards: list[float] = []
    last = time.monotonic()

    def look() -> None:
        nonlocal last
        for _ in range(looks):
            before = last
            now = time.monotonic()
            if now < before:
                backwards.append(before - now)
            last = now

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tick = time.get_clock_info("monotonic").resolution
    if backwards:
        return f"the monotonic clock goes back, by {max(backwards):g} s"
    return f"the monotonic clock ticks every {tick:g} s only" if tick > 0.02 else ""
