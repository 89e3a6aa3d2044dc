"""The trainer's process: `python -m fleuve.train '{"settings": {...}}'`.

Options: `settings`, a run's resolved settings; `weights_directory`, where to publish (absent: a new one is made);
`directories`, in which checkpoints are written and read (absent: the run directory); `threads` for torch (0: leave
it); `host` and `port` to listen on when no socket was passed on by a parent. Of several ranks (`trainer.ranks`), each
is such a process, with its `rank`; those after the first are told by `POST /meet` what the first one's `/health`
says of where they meet.
"""

from __future__ import annotations

import json
import queue
import secrets
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleuve.ending import leave_after
from fleuve.launch.child import adopt, has_listening_socket, listening_socket
from fleuve.wire.guard import take_token
from fleuve.wire.listen import bind

if TYPE_CHECKING:
    from fleuve.config.settings import Settings


def main(argument: str) -> None:
    """Serve until the process is told to end (SIGTERM) or its parent is gone; the weights directory goes with it."""
    from fleuve.config.settings import Settings
    from fleuve.weights.directory import make_directory

    options: dict[str, Any] = json.loads(argument)
    settings = Settings.model_validate(options["settings"])
    if options.get("rank", 0):
        _serve_rank(settings, options)
        return
    given = options.get("weights_directory")
    directory = Path(given) if given else make_directory(settings.weights.parent)
    adopt(on_orphaned=lambda: shutil.rmtree(directory, ignore_errors=True))

    sock = _socket(options)
    token = take_token(sock)
    directories = [Path(d).resolve() for d in options.get("directories", [settings.run_dir])]

    import torch
    from aiohttp import web
    from transformers.utils.logging import disable_progress_bar

    from fleuve.train.broadcasting import add_broadcasts
    from fleuve.train.leader import Leader
    from fleuve.train.ranks import Meeting, join_ranks
    from fleuve.train.server import TrainerServer
    from fleuve.train.trainer import Trainer
    from fleuve.weights.store import WeightStore

    disable_progress_bar()
    if threads := int(options.get("threads", 0)):
        torch.set_num_threads(threads)
    store = WeightStore(directory, settings.weights.keep)
    place = bind(sock.getsockname()[0], 0) if settings.trainer.sharded else None
    meeting = None
    if place is not None:
        host, port = place.getsockname()[:2]
        meeting = Meeting(f"{host}:{port}", secrets.token_hex(32))

    def make_trainer() -> Trainer | Leader:
        if meeting is None:
            return Trainer(settings, store)
        group = join_ranks(settings.trainer, 0, meeting, place)
        return Leader(Trainer(settings, store, group), group)

    try:
        server = TrainerServer(make_trainer, directories, token, meeting)
        app = server.app()
        if settings.weights.transport == "broadcast":
            add_broadcasts(app, settings, sock.getsockname()[0], directory)
        try:
            web.run_app(app, sock=sock, print=None, access_log=None, shutdown_timeout=0.2)
        finally:
            server.close()
    finally:
        store.close()


def _serve_rank(settings: Settings, options: dict[str, Any]) -> None:
    """Any rank but the first: follows that one, for as long as it is there."""
    adopt()
    sock, rank = _socket(options), int(options["rank"])
    token = take_token(sock)

    import torch
    from aiohttp import web
    from transformers.utils.logging import disable_progress_bar

    from fleuve.train.leader import follow
    from fleuve.train.ranks import Meeting, join_ranks
    from fleuve.train.server import rank_app
    from fleuve.train.trainer import Trainer

    disable_progress_bar()
    if threads := int(options.get("threads", 0)):
        torch.set_num_threads(threads)
    busy = ["starting"]
    told: queue.Queue[Meeting] = queue.Queue()

    def work() -> None:
        group = join_ranks(settings.trainer, rank, told.get(timeout=settings.trainer.start_timeout))
        trainer = Trainer(settings, None, group)
        busy[0] = ""
        follow(trainer, group, lambda what: busy.__setitem__(0, what))

    threading.Thread(target=leave_after, args=(work,), name="trainer", daemon=True).start()
    app = rank_app(f"trainer-{rank}", lambda: busy[0], told.put, token)
    web.run_app(app, sock=sock, print=None, access_log=None, shutdown_timeout=0.2)


def _socket(options: dict[str, Any]) -> socket.socket:
    if has_listening_socket():
        return listening_socket()
    return bind(options.get("host", "127.0.0.1"), int(options.get("port", 8600)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fleuve.train '{\"settings\": {...}}'")
    leave_after(lambda: main(sys.argv[1]))
