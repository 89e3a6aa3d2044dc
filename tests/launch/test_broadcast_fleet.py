"""A fleet of real engines, one of which ends in the middle of a broadcast."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack

import pytest
import torch

from fleuve.config.settings import RolloutSettings
from fleuve.contracts import RolloutEngine
from fleuve.control.fleet import Fleet
from fleuve.control.health import Health
from fleuve.launch.broadcasting import BroadcastEngine, Broadcasts
from fleuve.launch.engines import start_engine
from fleuve.launch.kinds import KINDS
from fleuve.modeling.loading import load_model
from fleuve.types import WeightFile
from fleuve.weights.broadcast import Sender
from fleuve.weights.group import Group
from fleuve.weights.invitation import Call, Hall, Loss
from fleuve.weights.store import WeightStore

MODEL = "builtin:small"
ROLLOUT = RolloutSettings(update_timeout=20.0)


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


class Watch:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def step(self, metrics, batch): ...
    def span(self, track, name, start, end, **args): ...
    def count(self, name, value, at): ...
    def activity(self, who, what): ...

    def note(self, message: str) -> None:
        self.notes.append(message)


async def deliver(weights: WeightFile) -> None:
    """The file is there."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_others_have_the_new_version_in_time_and_the_one_that_ended_is_given_up(
    tmp_path, monkeypatch, number
):
    torch.set_num_threads(1)
    model = load_model(MODEL, torch.float32)
    store = WeightStore(tmp_path / "weights", keep=9)
    sender = Sender("127.0.0.1", "cpu", 10.0, 1 << 16)
    watch = Watch()
    broadcasts = Broadcasts(Here(sender), 10.0, watch.note)
    broadcast, counted = Group.broadcast, []
    pids: list[int] = []

    def ending(self: Group, *args) -> None:
        counted.append(1)
        if len(counted) == 10:
            os.kill(pids[1], number)
        broadcast(self, *args)

    async with AsyncExitStack() as stack:
        engines: list[RolloutEngine] = []
        for name in ("worker-0", "worker-1", "worker-2"):
            log = tmp_path / f"{name}.log"
            child = await start_engine(name, MODEL, ROLLOUT, log, threads=1, weights=store.directory)
            stack.push_async_callback(child.stop, 0)
            pids.append(child.pid)
            client = KINDS["embedded"].client(name, child.url, child.token, MODEL, ROLLOUT, 60.0)
            await stack.enter_async_context(client)
            engines.append(BroadcastEngine(name, client, deliver, broadcasts))
        fleet = Fleet(engines, seed=0, observer=watch)
        await fleet.update(store.publish(1, model.named_parameters()), "recompute")
        assert broadcasts.gauges() == {"weights/broadcast": 3.0, "weights/missed": 0.0}

        monkeypatch.setattr(Group, "broadcast", ending)
        began = time.monotonic()
        await fleet.update(store.publish(2, model.named_parameters()), "recompute")
        assert time.monotonic() - began < 2 * ROLLOUT.update_timeout + 15
        assert len(counted) >= 10
        assert fleet.states() == {"worker-0": Health.HEALTHY, "worker-1": Health.DEAD, "worker-2": Health.HEALTHY}
        assert [await engines[i].health() for i in (0, 2)] == [2, 2]
        assert any(note.startswith("worker-1 is given up (the update to version 2 failed") for note in watch.notes)

        await fleet.update(store.publish(3, model.named_parameters()), "recompute")
        assert [await engines[i].health() for i in (0, 2)] == [3, 3]
        await broadcasts.close()
    sender.close()
    store.close()
