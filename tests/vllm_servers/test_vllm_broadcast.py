"""A real vLLM server takes weights by broadcast, beside what it generates; by the file where that comes to nothing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from test_vllm_server import World, ask, until_tokens, world  # noqa: F401 (a fixture)

from fleuve.contracts import RolloutError
from fleuve.types import Invitation, WeightFile
from fleuve.weights.broadcast import Sender
from fleuve.weights.group import BroadcastError
from fleuve.weights.invitation import Call

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


def invited(sender: Sender, number: int, seconds: float = 60.0) -> Invitation:
    hall = sender.hall
    return Invitation(address=hall.address, key=hall.key, number=number, member="w", seconds=seconds)


async def test_what_was_broadcast_samples_from_then_on_and_versions_are_true(world: World) -> None:  # noqa: F811
    sender = Sender("127.0.0.1", "cpu", 60.0, 1 << 20)
    async with world.client() as engine:
        assert engine.seats == 1
        await engine.update_weights(world.publish(), "recompute")
        request = ask("a", 400)
        answering = asyncio.create_task(engine.generate(request))
        await until_tokens(engine, "a", 5)
        for number in (1, 2):
            file = world.publish()
            nowhere = WeightFile(version=file.version, path="/nowhere", bytes=file.bytes, checksum=file.checksum)
            sending = asyncio.to_thread(sender.send, Call(number=number, weights=file, members={"w": engine.seats}))
            taken, sent = await asyncio.gather(
                engine.update_weights(nowhere, "recompute", invited(sender, number)), sending
            )
            assert (taken.version, sent) == (file.version, ["w"])
        answer = await answering
        assert len(np.unique(answer.versions)) >= 2
        assert answer.versions[-1] == world.version
        assert world.difference(request, answer) < 1e-3
    sender.close()


async def test_a_broadcast_that_comes_to_nothing_changes_nothing_and_the_file_is_taken(world: World) -> None:  # noqa: F811
    sender = Sender("127.0.0.1", "cpu", 1.0, 1 << 20)
    async with world.client() as engine:
        await engine.update_weights(world.publish(), "recompute")
        before = world.version
        file = world.publish()
        with pytest.raises(BroadcastError):  # nobody has been told
            await asyncio.to_thread(sender.send, Call(number=1, weights=file, members={"w": 1}))
        with pytest.raises(RolloutError, match="by broadcast: none of 1 workers came"):
            await engine.update_weights(file, "recompute", invited(sender, 1))
        answer = await engine.generate(ask("a", 20))
        assert set(answer.versions) == {before}
        await engine.update_weights(file, "recompute")
        answer = await engine.generate(ask("b", 20))
        assert set(answer.versions) == {file.version}
        assert world.difference(ask("b", 20), answer) < 1e-3
    sender.close()
