"""Child processes for the tests of fleuve/launch: `python -m launch_children '{"role": ...}'`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fleuve.launch import child
from fleuve.launch.process import ChildProcess


def serve(options: dict) -> None:
    """An HTTP server on the inherited socket that says who it is; `delay` seconds late."""
    from aiohttp import web

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0))})

    async def environment(_: web.Request) -> web.Response:
        return web.json_response(dict(os.environ))

    time.sleep(options.get("delay", 0))
    if options.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/environment", environment)])
    web.run_app(app, sock=child.listening_socket(), print=None, handle_signals="stubborn" not in options)


def family(options: dict) -> None:
    """A parent of two children, each of which starts a grandchild; all write their pids into `directory`."""

    async def run() -> None:
        for name, role in (("with-clean-up", "middle"), ("without", "middle")):
            await ChildProcess.start(
                name,
                "launch_children",
                {"role": role, "name": name, "directory": options["directory"]},
                Path(options["directory"]) / f"{name}.log",
                with_socket=False,
            )
        await asyncio.sleep(600)

    asyncio.run(run())


def middle(options: dict) -> None:
    directory = Path(options["directory"])
    grandchild = json.dumps({"role": "leaf", "name": f"{options['name']}.leaf", "directory": options["directory"]})
    subprocess.Popen([sys.executable, "-m", "launch_children", grandchild], **child.spawn_arguments())
    write_pid(directory, options["name"])
    time.sleep(600)


def leaf(options: dict) -> None:
    write_pid(Path(options["directory"]), options["name"])
    if options["name"].startswith("with-"):
        time.sleep(600)
    10 ** (10**9)  # holds the interpreter lock inside one C call for hours: no thread of ours can run


def write_pid(directory: Path, name: str) -> None:
    partial = directory / f"{name}.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(directory / f"{name}.pid")


def main() -> None:
    options = json.loads(sys.argv[1])
    role = options["role"]
    clean_up = None
    if options.get("name") == "with-clean-up":
        clean_up = (Path(options["directory"]) / "cleaned-up").touch
    child.adopt(clean_up)
    if role == "lost":  # the first time
        marker = Path(options["marker"])
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), options["signal"])
        role = "serve"
    if role == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if role == "die":
        print("no weights here", flush=True)
        sys.exit(3)
    {"serve": serve, "family": family, "middle": middle, "leaf": leaf}[role](options)


if __name__ == "__main__":
    main()
