"""The part of the trainer's server that broadcasts what was published, in a thread beside the training.

GET /broadcast → Hall       POST /broadcast  Call → {members}       POST /lose  Loss → {}
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from fleuve.config.settings import Settings
from fleuve.modeling.loading import pick_device
from fleuve.types import decode, encode
from fleuve.weights.broadcast import Sender
from fleuve.weights.invitation import Call, Loss
from fleuve.wire.confine import confined


def add_broadcasts(app: web.Application, settings: Settings, host: str, weights: Path) -> None:
    """Have `app` broadcast files of the directory `weights` as well, from `host`: the address that it listens on."""
    device = pick_device(settings.trainer.device)
    sender = Sender(
        host,
        "cuda:0" if device == "cuda" else device,  # rank 0's
        settings.weights.broadcast_timeout,
        settings.weights.bucket_mb << 20,
    )
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="broadcast")

    async def hall(_: web.Request) -> web.Response:
        return web.Response(body=encode(sender.hall))

    async def broadcast(request: web.Request) -> web.Response:
        call = decode(await request.read(), Call)
        confined(call.weights.path, [weights])
        return web.json_response(
            {"members": await asyncio.get_running_loop().run_in_executor(thread, sender.send, call)}
        )

    async def lose(request: web.Request) -> web.Response:
        sender.lose(decode(await request.read(), Loss))
        return web.json_response({})

    async def close(_: web.Application) -> None:
        sender.close()
        thread.shutdown(wait=False, cancel_futures=True)

    app.add_routes([web.get("/broadcast", hall), web.post("/broadcast", broadcast), web.post("/lose", lose)])
    app.on_cleanup.append(close)
