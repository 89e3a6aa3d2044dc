"""Who is told of a version together gets it by one broadcast; everybody else, and whoever missed it, by the file."""

from __future__ import annotations

import asyncio

import pytest

from fleuve.contracts import RolloutError, TrainerLostError, WorkerLostError
from fleuve.launch.broadcasting import BroadcastEngine, Broadcasts
from fleuve.types import WeightFile, WeightUpdate
from fleuve.weights.invitation import Call, Hall, Loss

HALL = Hall(address="10.0.0.1:7", key="key")


def weights(version: int) -> WeightFile:
    path = f"/w/weights-{version:08d}.safetensors"
    return WeightFile(version=version, path=path, bytes=1, checksum="crc32:00000000")


class Sender:
    """Notes what is asked of it; a broadcast is over when `over` is set."""

    def __init__(self, gone: bool = False) -> None:
        self.gone = gone
        self.calls: list[Call] = []
        self.losses: list[Loss] = []
        self.over = asyncio.Event()
        self.over.set()

    async def hall(self) -> Hall:
        await asyncio.sleep(0)
        if self.gone:
            raise TrainerLostError("the trainer is being started again")
        return HALL

    async def broadcast(self, call: Call) -> None:
        self.calls.append(call)
        await self.over.wait()

    async def lose(self, loss: Loss) -> None:
        self.losses.append(loss)


class Worker:
    """Notes how its weights came; `fails` is what an update by broadcast comes to."""

    seats = 1

    def __init__(self, fails: Exception | None = None) -> None:
        self.ways: list[str] = []
        self.fails = fails

    async def update_weights(self, weights, interrupt, invitation=None):
        self.ways.append("file" if invitation is None else f"broadcast {invitation.number}")
        if invitation is not None:
            assert (invitation.address, invitation.key) == (HALL.address, HALL.key)
            await asyncio.sleep(0.01)
            if self.fails is not None:
                raise self.fails
        return WeightUpdate(version=weights.version, seconds=0.0, interrupted=0)

    async def generate(self, request): ...
    async def health(self): ...
    async def abort(self, request_ids): ...
    async def pause(self): ...
    async def resume(self): ...
    async def metrics(self): ...
    async def progress(self, known): ...


class Fleet:
    """Workers told of weights by one sender's broadcasts."""

    def __init__(self, sender: Sender, *workers: Worker) -> None:
        self.sender, self.workers = sender, workers
        self.notes: list[str] = []
        self.brought: list[str] = []
        self.broadcasts = Broadcasts(sender, 5.0, self.notes.append)
        self.engines = [self.engine(f"worker-{i}", worker) for i, worker in enumerate(workers)]

    def engine(self, name: str, worker: Worker) -> BroadcastEngine:
        async def deliver(weights: WeightFile) -> None:
            self.brought.append(f"{name}: {weights.version}")

        return BroadcastEngine(name, worker, deliver, self.broadcasts)

    async def update(self, version: int) -> list[WeightUpdate | BaseException]:
        together = (engine.update_weights(weights(version), "recompute") for engine in self.engines)
        return await asyncio.gather(*together, return_exceptions=True)


async def test_who_is_told_together_is_called_together():
    fleet = Fleet(Sender(), Worker(), Worker(), Worker())
    for version in (1, 2):
        await fleet.update(version)
    assert [worker.ways for worker in fleet.workers] == [["broadcast 1", "broadcast 2"]] * 3
    assert [(call.number, call.weights.version, len(call.members)) for call in fleet.sender.calls] == [
        (1, 1, 3),
        (2, 2, 3),
    ]
    assert fleet.brought == []
    assert fleet.broadcasts.gauges() == {"weights/broadcast": 6.0, "weights/missed": 0.0}


async def test_who_is_told_later_takes_the_file_that_is_brought_first():
    fleet = Fleet(Sender(), Worker())
    await fleet.update(1)
    late = Worker()
    await fleet.engine("late", late).update_weights(weights(1), "recompute")
    assert (late.ways, fleet.brought) == (["file"], ["late: 1"])
    assert len(fleet.sender.calls) == 1


async def test_who_did_not_get_it_takes_the_file_and_nobody_waits_for_it():
    sender = Sender()
    sender.over.clear()
    fleet = Fleet(sender, Worker(), Worker(RolloutError("worker-1: nothing went on for 5 s")))
    updates = await fleet.update(1)
    await asyncio.sleep(0)
    assert [update.version for update in updates] == [1, 1]
    assert [worker.ways for worker in fleet.workers] == [["broadcast 1"], ["broadcast 1", "file"]]
    assert fleet.brought == ["worker-1: 1"]
    assert fleet.notes == ["worker-1 takes the file: worker-1: nothing went on for 5 s"]
    assert [loss.member.rpartition("-")[0] for loss in sender.losses] == ["worker-1"]
    assert sender.losses[0].member in sender.calls[0].members
    assert fleet.broadcasts.gauges() == {"weights/broadcast": 1.0, "weights/missed": 1.0}
    await fleet.broadcasts.close()


async def test_a_worker_that_is_lost_is_lost_and_the_sender_hears_of_it():
    sender = Sender()
    sender.over.clear()
    fleet = Fleet(sender, Worker(), Worker(WorkerLostError("worker-1: connection lost")))
    first, second = await fleet.update(1)
    await asyncio.sleep(0)
    assert first.version == 1
    assert isinstance(second, WorkerLostError)
    assert fleet.workers[1].ways == ["broadcast 1"]
    assert len(sender.losses) == 1
    await fleet.broadcasts.close()


@pytest.mark.parametrize("turns", range(1, 9))
async def test_a_worker_that_is_given_up_meanwhile_is_not_waited_for(turns):
    """Whenever that is: before its own part in the broadcast has begun, and during it."""
    sender = Sender()
    sender.over.clear()
    fleet = Fleet(sender, Worker())
    told = asyncio.create_task(fleet.engines[0].update_weights(weights(1), "recompute"))
    for _ in range(turns):
        await asyncio.sleep(0)
    told.cancel()
    with pytest.raises(asyncio.CancelledError):
        await told
    for _ in range(4):
        await asyncio.sleep(0)
    assert len(sender.losses) == len(sender.calls)
    await fleet.broadcasts.close()


async def test_without_a_sender_all_take_the_file():
    fleet = Fleet(Sender(gone=True), Worker(), Worker())
    await fleet.update(1)
    assert [worker.ways for worker in fleet.workers] == [["file"], ["file"]]
    assert fleet.notes == ["version 1 is not broadcast: the trainer is being started again"]


async def test_while_one_broadcast_is_not_over_no_other_is_begun():
    """The sender may hang on a worker that everybody else has given up."""
    sender = Sender()
    sender.over.clear()
    fleet = Fleet(sender, Worker(), Worker())
    await fleet.update(1)
    await fleet.update(2)
    assert [worker.ways for worker in fleet.workers] == [["broadcast 1", "file"]] * 2
    sender.over.set()
    await asyncio.sleep(0)
    await fleet.update(3)
    assert [worker.ways[-1] for worker in fleet.workers] == ["broadcast 2"] * 2


async def test_a_process_under_the_name_of_another_is_another_member():
    fleet = Fleet(Sender(), Worker())
    await fleet.update(1)
    fleet.engines = [fleet.engine("worker-0", fleet.workers[0])]
    await fleet.update(2)
    first, second = (set(call.members) for call in fleet.sender.calls)
    assert not first & second
