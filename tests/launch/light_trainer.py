"""A trainer's process without a model, for tests: its weights are a checksum over all that it was trained on.

Options: `log`, a file that gets a line for everything asked of it.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path

from aiohttp import web

from fleuve.launch.child import adopt, listening_socket
from fleuve.types import Batch, StepResult, WeightFile, decode, encode


def main(argument: str) -> None:
    adopt()
    log = Path(json.loads(argument)["log"])
    state = {"version": 0, "weights": 0}

    def note(what: str) -> None:
        with log.open("a") as file:
            file.write(f"{what}\n")

    def packed(value: object) -> web.Response:
        return web.Response(body=encode(value))

    async def step(request: web.Request) -> web.Response:
        batch = decode(await request.read(), Batch)
        note(f"step {batch.version + 1}")
        if batch.version != state["version"]:
            return web.json_response({"error": "another version", "kind": "ValueError"}, status=500)
        ids = [group.id for group in batch.groups]
        state["version"] += 1
        state["weights"] = zlib.crc32(str(ids).encode(), state["weights"])
        metrics = {"weights": float(state["weights"])}
        return packed(StepResult(version=state["version"], metrics=metrics, advantages=[[] for _ in ids], trained=ids))

    async def save(request: web.Request) -> web.Response:
        file = Path((await request.json())["path"]) / "trainer.safetensors"
        os.makedirs(file.parent, exist_ok=True)
        file.write_text(json.dumps(state))
        return web.json_response({})

    async def load(request: web.Request) -> web.Response:
        path = Path((await request.json())["path"])
        note(f"load {path.name}")
        state.update(json.loads((path / "trainer.safetensors").read_text()))
        return web.json_response({})

    async def publish(request: web.Request) -> web.Response:
        note(f"publish {state['version']}")
        return packed(WeightFile(version=state["version"], path="w", bytes=0, checksum=str(state["weights"])))

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"version": state["version"]})

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post(f"/{f.__name__}", f) for f in (step, save, load, publish)])
    app.add_routes([web.get("/health", health)])
    note("start")
    web.run_app(app, sock=listening_socket(), print=None, access_log=None)


if __name__ == "__main__":
    main(sys.argv[1])
