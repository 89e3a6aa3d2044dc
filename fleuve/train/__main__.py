"""The trainer's process: `python -m fleuve.train '{"settings": {...}}'`.

Options: `settings`, a run's resolved settings; `weights_directory`, where to publish (absent: a new one is made);
`directories`, in which checkpoints are written and read (absent: the run directory); `threads` for torch (0: leave it);
`host` and `port` to listen on when no socket was passed on by a parent.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from fleuve.ending import leave_after
from fleuve.launch.child import adopt, has_listening_socket, listening_socket


def main(argument: str) -> None:
    """Serve until the process is told to end (SIGTERM) or its parent is gone; the weights directory goes with it."""
    from fleuve.config.settings import Settings
    from fleuve.weights.directory import make_directory
    from fleuve.wire.guard import take_token
    from fleuve.wire.listen import bind

    options: dict[str, Any] = json.loads(argument)
    settings = Settings.model_validate(options["settings"])
    given = options.get("weights_directory")
    parent = settings.weights.path if settings.weights.transport == "path" else None
    directory = Path(given) if given else make_directory(parent)
    adopt(on_orphaned=lambda: shutil.rmtree(directory, ignore_errors=True))

    if has_listening_socket():
        sock = listening_socket()
    else:
        sock = bind(options.get("host", "127.0.0.1"), int(options.get("port", 8600)))
    token = take_token(sock)
    directories = [Path(d).resolve() for d in options.get("directories", [settings.run_dir])]

    import torch
    from aiohttp import web
    from transformers.utils.logging import disable_progress_bar

    from fleuve.train.server import TrainerServer
    from fleuve.train.trainer import Trainer
    from fleuve.weights.store import WeightStore

    disable_progress_bar()
    if threads := int(options.get("threads", 0)):
        torch.set_num_threads(threads)
    store = WeightStore(directory, settings.weights.keep)
    try:
        server = TrainerServer(lambda: Trainer(settings, store), directories, token)
        try:
            web.run_app(server.app(), sock=sock, print=None, access_log=None, shutdown_timeout=0.2)
        finally:
            server.close()
    finally:
        store.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fleuve.train '{\"settings\": {...}}'")
    leave_after(lambda: main(sys.argv[1]))
