"""What is asked of a run while it goes on: `fleuve fleet` leaves an order in the run directory, the run carries it out
and leaves its reply beside it. Whoever may write there may ask; nothing listens on any port."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from fleuve.control.fleet import Fleet
from fleuve.errors import UserError

ORDERS = "orders"
LOOK_EVERY = 0.5
"""Seconds between two looks at the directory."""
MAX_ORDER = 4096
"""Bytes."""
PATIENCE = 15.0
"""Seconds for a run to reply."""


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`show` the workers; `add` one; `remove` the one named, `at_once` or when its answers have ended."""

    what: Literal["show", "add", "remove"]
    worker: str | None = None
    at_once: bool = False


class Reply(msgspec.Struct, frozen=True):
    """What became of it, in lines."""

    done: bool
    lines: list[str]


async def take_orders(run: Path, fleet: Fleet) -> None:
    """Carry out what is asked of the run in directory `run`; never returns."""
    directory = run / ORDERS
    while True:
        for path in sorted(directory.glob("*.order.json")):
            with suppress(OSError):
                content = _read(path)
                path.unlink()
                if content is not None:
                    _write(path.with_name(path.name.replace(".order.", ".reply.")), carry_out(content, fleet))
        await asyncio.sleep(LOOK_EVERY)


def _read(path: Path) -> bytes | None:
    """An order; None if whoever gave it does not wait for the reply any more, and so does not hold it."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(MAX_ORDER)
    return None


def carry_out(content: bytes, fleet: Fleet) -> Reply:
    """One order, as it came."""
    try:
        order = msgspec.json.decode(content, type=Order)
        match order.what:
            case "add":
                name = fleet.add(order.worker)
                return Reply(done=True, lines=[f"{name} is being started; it gets groups once it has the weights"])
            case "remove":
                name = order.worker or ""
                fleet.remove(name, order.at_once)
                when = "now; others take its answers up" if order.at_once else "when its answers have ended"
                return Reply(done=True, lines=[f"{name} leaves {when}"])
            case _:
                return Reply(done=True, lines=_shown(fleet))
    except (msgspec.DecodeError, ValueError) as error:
        return Reply(done=False, lines=[str(error)])


def _shown(fleet: Fleet) -> list[str]:
    lines = []
    for name, worker in fleet.workers.items():
        life = worker.life
        state = "leaving" if worker.leaving else worker.health.state.value
        serves = f"version {life.version}  {fleet.router.in_flight.get(life, 0)} answers" if life else worker.why
        lines.append(f"{name:<12} {state:<10} {serves}".rstrip())
    return lines


def give_order(run: Path, order: Order, patience: float = PATIENCE) -> list[str]:
    """Ask the run in directory `run`, and wait for its reply.

    Raises:
        UserError: there is none, it does not reply, or it refuses.
    """
    directory = run / ORDERS
    if not (run / "config.toml").exists():
        raise UserError(f"{run}: no run directory (a run's settings, config.toml, are not there)")
    path = directory / f"{secrets.token_hex(8)}.order.json"
    answer = path.with_name(path.name.replace(".order.", ".reply."))
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        with path.with_suffix(".part").open("wb") as part:
            fcntl.flock(part, fcntl.LOCK_EX)
            part.write(msgspec.json.encode(order))
            part.flush()
            os.replace(part.name, path)
            deadline = time.monotonic() + patience
            while not answer.exists():
                if time.monotonic() > deadline:
                    path.unlink(missing_ok=True)
                    raise UserError(f"{run}: nobody replied within {patience:g} s: is the run still going on?")
                time.sleep(0.05)
        reply = msgspec.json.decode(answer.read_bytes(), type=Reply)
        answer.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    if not reply.done:
        raise UserError("; ".join(reply.lines))
    return reply.lines


def _write(path: Path, reply: Reply) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(reply))
    os.replace(part, path)
