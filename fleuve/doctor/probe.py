"""What torch finds: GPUs, and whether processes can add numbers up together. `python -m fleuve.doctor.probe WHAT`.

A driver that is broken hangs, and so does a collective whose ranks do not reach each other; therefore each probe is a
process with a deadline, killed with all it started when that is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

NUMBERS = 1 << 20
"""Floats that are added up: 4 MB."""


class Gpu(msgspec.Struct, frozen=True):
    """`memory` and `free` in bytes."""

    name: str
    memory: int
    free: int
    capability: tuple[int, int]


class Devices(msgspec.Struct, frozen=True):
    """`no_peers` are the pairs of GPUs of which the first does not reach the second's memory. `problem`: why nothing
    could be found out."""

    gpus: list[Gpu] = []
    cuda: str | None = None
    """The version that torch was built for; None: without."""
    driver: str | None = None
    no_peers: list[tuple[int, int]] = []
    problem: str = ""


class Reduced(msgspec.Struct, frozen=True):
    """An all-reduce by several ranks. `problem`: why there was none, or its sum was wrong."""

    ranks: int
    seconds: float = 0.0
    problem: str = ""


def run_devices(deadline: float) -> Devices:
    """What torch sees on this machine."""
    found = _run(["devices"], deadline)
    return Devices(problem=found) if isinstance(found, str) else msgspec.json.decode(found, type=Devices)


def run_reduction(backend: str, ranks: int, deadline: float) -> Reduced:
    """`ranks` processes of this machine add numbers up, by `gloo` or `nccl`."""
    with tempfile.TemporaryDirectory(prefix="fleuve-doctor-") as meeting:
        found = _run(["reduce", backend, str(ranks), str(Path(meeting) / "store")], deadline)
    if isinstance(found, str):
        return Reduced(ranks, problem=found)
    return msgspec.json.decode(found, type=Reduced)


def _run(arguments: list[str], deadline: float) -> bytes | str:
    """What the probe printed; or, in a line, why it printed nothing."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not env.get("CUDA_VISIBLE_DEVICES", "x"):
        del env["CUDA_VISIBLE_DEVICES"]  # how Ray hides a node's GPUs from those who asked for none
    process = subprocess.Popen(
        [sys.executable, "-m", "fleuve.doctor.probe", *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        _kill(process)
        last = _last_line(process.communicate()[1])
        return f"no end within {deadline:g} s" + (f": {last}" if last else "")
    finally:
        _kill(process)
        process.wait()
    if process.returncode == 0 and output.strip():
        return output.strip().splitlines()[-1]
    return _last_line(errors) or f"ended with status {process.returncode}, without a word"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(output: bytes) -> str:
    return next((line.strip() for line in reversed(output.decode(errors="replace").splitlines()) if line.strip()), "")


def devices() -> Devices:
    """In this process."""
    import torch

    if not torch.cuda.is_available():
        return Devices(cuda=torch.version.cuda)
    count = torch.cuda.device_count()
    gpus = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, memory = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(properties.name, memory, free, (properties.major, properties.minor)))
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return Devices(gpus, torch.version.cuda, _driver(), apart)


def _driver() -> str | None:
    """NVIDIA's, by its version file: `NVRM version: ... Kernel Module  550.54.15  ...`."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return next((w for w in words if w[:1].isdigit() and "." in w), None)


def reduce(backend: str, ranks: int, store: str) -> Reduced:
    """In this process and `ranks - 1` others."""
    others = [
        subprocess.Popen([sys.executable, "-m", "fleuve.doctor.probe", "rank", backend, str(ranks), store, str(rank)])
        for rank in range(1, ranks)
    ]
    try:
        return _rank(backend, ranks, store, 0)
    finally:
        for other in others:
            other.wait()


def _rank(backend: str, ranks: int, store: str, rank: int) -> Reduced:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        numbers = torch.full((NUMBERS,), float(rank + 1), device=device)
        dist.all_reduce(numbers)  # the first one makes the connections
        numbers.fill_(float(rank + 1))
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        found = {float(numbers.min()), float(numbers.max())}
        seconds = time.perf_counter() - began
    finally:
        dist.destroy_process_group()
    right = {ranks * (ranks + 1) / 2}
    return Reduced(
        ranks, seconds, "" if found == right else f"the sum is {sorted(found)}, and should be {right.pop():g}"
    )


def main(arguments: list[str]) -> None:
    """One probe; its findings as JSON on standard output."""
    found: object = None
    match arguments:
        case ["devices"]:
            found = devices()
        case ["reduce", backend, ranks, store]:
            found = reduce(backend, int(ranks), store)
        case ["rank", backend, ranks, store, rank]:
            _rank(backend, int(ranks), store, int(rank))
        case _:
            sys.exit("usage: python -m fleuve.doctor.probe devices | reduce BACKEND RANKS STORE")
    if found is not None:
        print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
