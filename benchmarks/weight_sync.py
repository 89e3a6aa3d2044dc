"""From "step done" to "every worker samples with it": seconds, against a plain copy in memory of the same bytes.

    python benchmarks/weight_sync.py [--quick] [--disk DIR] [--vllm]

The trainer's side is this process: fp32 masters, published in the workers' dtype by the trainer's own store. Two
embedded engines, processes of their own, generate all the while; an update is over when the last of them has
acknowledged it, after which no token of an older version is sampled. Transports: a file in shared memory, a file on
disk, a mirror (each worker's machine fetches over HTTP into its own shared memory; here from this process to itself), a
broadcast over gloo, and with `--vllm` a vLLM server that reads from shared memory.

The parts are measured one by one in this process, each by itself: `gather` (masters to the workers' dtype), `write`,
`checksum` (by the writer, and by each reader), `read`, `load` (into the model). `stands still` is what the workers say:
how long nothing was sampled, for loading.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from _models import SMOLLM2, write_random_model
from _report import report
from safetensors.torch import save_file
from torch import Tensor

from fleuve.config.models import resolve_model
from fleuve.config.settings import RolloutSettings, WeightsSettings
from fleuve.contracts import RolloutEngine
from fleuve.engine.parameters import Parameters
from fleuve.launch.broadcasting import BroadcastEngine, Broadcasts, Receiving
from fleuve.launch.engines import start_engine
from fleuve.launch.kinds import KINDS
from fleuve.modeling.loading import DTYPES, load_model
from fleuve.types import GenerationRequest, SamplingParams, WeightFile
from fleuve.weights import mirror, store
from fleuve.weights.broadcast import Sender
from fleuve.weights.directory import make_directory
from fleuve.weights.invitation import Call, Hall, Loss
from fleuve.wire.listen import bind

WORKERS, BUSY = 2, 4
"""Engines, and answers that each has in flight."""


@dataclass(frozen=True)
class Model:
    name: str
    path: str
    dtype: str


class Source:
    """What a trainer has: fp32 masters, a store to publish into."""

    def __init__(self, model: Model, directory: Path) -> None:
        self.dtype = DTYPES[model.dtype]
        self.model = load_model(model.path, self.dtype)
        self.masters = {name: p.detach().float() for name, p in self.model.named_parameters()}
        self.store = store.WeightStore(directory, keep=2)
        self.version = 0

    def cast(self) -> dict[str, Tensor]:
        """All weights in the workers' dtype."""
        return {name: master.to(self.dtype, copy=True) for name, master in self.masters.items()}

    def publish(self) -> WeightFile:
        """As `Trainer.publish`."""
        self.version += 1
        return self.store.publish(self.version, ((n, m.detach().to(self.dtype)) for n, m in self.masters.items()))


def timed(what: Callable[[], Any], rounds: int) -> float:
    """The median of its seconds; the first time is for the page faults."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        what()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def parts(source: Source, rounds: int) -> dict[str, float]:
    """Seconds of each, alone."""
    cast = source.cast()
    file = source.publish()
    scratch = Path(file.path).with_name("scratch.safetensors")
    tensors = store.read_weights(file)
    parameters = Parameters(source.model)
    bytes_ = torch.zeros(file.bytes, dtype=torch.uint8)
    copy = torch.zeros_like(bytes_)
    found = {
        "copy": timed(lambda: copy.copy_(bytes_), rounds),
        "gather": timed(source.cast, rounds),
        "write": timed(lambda: save_file(cast, scratch), rounds),
        "checksum": timed(lambda: store._checksum(Path(file.path)), rounds),
        "read": timed(lambda: store.read_weights(file), rounds),
        "load": timed(lambda: parameters.load(tensors), rounds),
    }
    found["read"] = max(0.0, found["read"] - found["checksum"])
    scratch.unlink()
    return found


class Workers:
    """Engines that are kept busy."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self.engines = engines
        self._busy = [asyncio.create_task(self._generate(e, i)) for e in engines for i in range(BUSY)]

    async def _generate(self, engine: RolloutEngine, number: int) -> None:
        for turn in range(10**6):
            sampling = SamplingParams(max_new_tokens=400, seed=turn, ignore_eos=True)
            await engine.generate(
                GenerationRequest(request_id=f"{number}/{turn}", input_ids=[5, 6, 7], sampling=sampling)
            )

    async def update(self, file: WeightFile) -> float:
        """All to this version; the longest standstill among them."""
        replies = await asyncio.gather(*(e.update_weights(file, "recompute") for e in self.engines))
        assert {reply.version for reply in replies} == {file.version}
        return max(reply.seconds for reply in replies)

    async def close(self) -> None:
        for task in self._busy:
            task.cancel()
        for task in self._busy:
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def workers(model: Model, directories: Sequence[Path], kind: str, logs: Path) -> AsyncIterator[Workers]:
    """An engine for each directory that weights come from."""
    rollout = RolloutSettings(engine=kind, dtype=model.dtype, device="cpu", start_timeout=600.0)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        engines = []
        for number, directory in enumerate(directories):
            log = logs / f"{kind}-{number}.log"
            child = await start_engine(f"w{number}", model.path, rollout, log, threads=1, weights=directory)
            stack.push_async_callback(child.stop)
            client = KINDS[kind].client(f"w{number}", child.url, child.token, model.path, rollout, 600.0)
            engines.append(await stack.enter_async_context(client))
        busy = Workers(engines)
        stack.push_async_callback(busy.close)
        await asyncio.sleep(1.0)
        yield busy


async def by_file(model: Model, directory: Path, kind: str, rounds: int, logs: Path) -> dict[str, float]:
    """Workers read what the trainer writes."""
    source = Source(model, directory / "weights")
    count = WORKERS if kind == "embedded" else 1
    try:
        async with workers(model, [directory] * count, kind, logs) as busy:
            return await _rounds(source, rounds, lambda file: busy.update(file))
    finally:
        source.store.close()


async def by_mirror(model: Model, directory: Path, rounds: int, logs: Path) -> dict[str, float]:
    """Workers read from a copy that is fetched first."""
    source = Source(model, directory / "weights")
    copies = [mirror.Mirror(directory / f"copy-{i}") for i in range(WORKERS)]
    with bind("127.0.0.1", 0) as sock:
        end = await mirror.serve(source.store.directory, sock, "token")
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            async with workers(model, [c.directory for c in copies], "embedded", logs) as busy:

                async def one(copy: mirror.Mirror, engine: RolloutEngine, file: WeightFile) -> float:
                    there = msgspec.structs.replace(file, path=str(copy.directory / Path(file.path).name))
                    await copy.bring(there, url, "token", 60.0)
                    return (await engine.update_weights(there, "recompute")).seconds

                async def update(file: WeightFile) -> float:
                    pairs = zip(copies, busy.engines, strict=True)
                    return max(await asyncio.gather(*(one(copy, engine, file) for copy, engine in pairs)))

                return await _rounds(source, rounds, update)
        finally:
            await end()
            for copy in copies:
                copy.close()
            source.store.close()


class Here:
    """`broadcasting.Sending` by a sender of this process."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender

    async def hall(self) -> Hall:
        return self.sender.hall

    async def broadcast(self, call: Call) -> None:
        await asyncio.to_thread(self.sender.send, call)

    async def lose(self, loss: Loss) -> None:
        self.sender.lose(loss)


async def by_broadcast(model: Model, directory: Path, rounds: int, logs: Path) -> dict[str, float]:
    """Workers receive what this process reads from the file that was published, all at once."""

    async def deliver(file: WeightFile) -> None:
        raise RuntimeError(f"version {file.version} did not come by broadcast")

    source, settings = Source(model, directory / "weights"), WeightsSettings()
    sender = Sender("127.0.0.1", "cpu", settings.broadcast_timeout, settings.bucket_mb << 20)
    broadcasts = Broadcasts(Here(sender), settings.broadcast_timeout, lambda note: print(note, file=sys.stderr))
    try:
        async with workers(model, [directory] * WORKERS, "embedded", logs) as busy:
            engines = cast(Sequence[Receiving], busy.engines)
            busy.engines = [BroadcastEngine(f"w{i}", e, deliver, broadcasts) for i, e in enumerate(engines)]
            return await _rounds(source, rounds, lambda file: busy.update(file))
    finally:
        sender.close()
        await broadcasts.close()
        source.store.close()


async def _rounds(source: Source, rounds: int, update: Callable[[WeightFile], Any]) -> dict[str, float]:
    published, total, still = [], [], []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        file = await asyncio.to_thread(source.publish)
        published.append(time.perf_counter() - began)
        still.append(await update(file))
        total.append(time.perf_counter() - began)
        await asyncio.sleep(0.2)
    taken = {"seconds": total, "publish": published, "stands still": still}
    return {name: statistics.median(values[1:]) for name, values in taken.items()} | {
        "min": min(total[1:]),
        "max": max(total[1:]),
    }


async def measure(model: Model, disk: Path, rounds: int, vllm: bool, logs: Path) -> list[dict[str, Any]]:
    """A row a transport."""
    memory = make_directory()
    alone: dict[str, dict[str, float]] = {}
    for name, directory in (("shared memory", memory), ("disk", disk)):
        source = Source(model, directory / "parts")
        alone[name] = parts(source, rounds)
        bytes_ = sum(t.numel() * t.element_size() for t in source.cast().values())
        source.store.close()
    rows = []
    ways: list[tuple[str, str, Any]] = [
        ("file in shared memory", "shared memory", lambda: by_file(model, memory, "embedded", rounds, logs)),
        ("file on disk", "disk", lambda: by_file(model, disk, "embedded", rounds, logs)),
        ("mirror over HTTP", "shared memory", lambda: by_mirror(model, memory, rounds, logs)),
        ("broadcast over gloo", "shared memory", lambda: by_broadcast(model, memory, rounds, logs)),
    ]
    if vllm:
        ways.append(("vLLM, shared memory", "shared memory", lambda: by_file(model, memory, "vllm", rounds, logs)))
    for name, medium, way in ways:
        took = await way()
        copy = alone[medium]["copy"]
        rows.append(
            {"model": model.name, "MB": bytes_ / 1e6, "transport": name, "seconds": took["seconds"], "min": took["min"]}
            | {"max": took["max"], "copies": took["seconds"] / copy, "copy": copy}
            | {key: took[key] for key in ("publish", "stands still")}
            | {f"{key} alone": alone[medium][key] for key in ("gather", "write", "checksum", "read", "load")}
        )
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, file=sys.stderr, flush=True)
    shutil.rmtree(memory, ignore_errors=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small model only; ends within a minute")
    parser.add_argument("--disk", type=Path, help="a directory on a disk (default: the temporary directory)")
    parser.add_argument("--vllm", action="store_true", help="a vLLM server too (minutes, see `make vllm`)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 3 if options.quick else 9
    with tempfile.TemporaryDirectory(dir=options.disk) as scratch:
        models = [Model("small, 0.6M, fp32", resolve_model("builtin:small"), "float32")]
        if not options.quick:
            write_random_model(Path(scratch) / "model", SMOLLM2, torch.bfloat16)
            models.append(Model("135M, bf16", str(Path(scratch) / "model"), "bfloat16"))
        rows = []
        for model in models:
            disk = Path(scratch) / "disk"
            disk.mkdir(exist_ok=True)
            rows += asyncio.run(measure(model, disk, rounds, options.vllm, Path(scratch)))
    headline = {
        f"{row['model']}: {row['transport']}": {"seconds": round(row["seconds"], 4), "copies": round(row["copies"], 1)}
        for row in rows
    }
    report("weight_sync", headline, rows)


if __name__ == "__main__":
    main()
