"""The trainer as a process of its own, over HTTP."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import torch
from tiny import make_batch, make_trainer, same_weights, save_tiny_model, settings_for, weights_of

from fleuve.contracts import TrainerError
from fleuve.errors import UserError
from fleuve.launch.process import ChildProcess
from fleuve.train.client import TrainerClient
from fleuve.types import Batch, Invitation, StepResult, WeightFile, decode, encode
from fleuve.weights.broadcast import Receiver
from fleuve.weights.directory import make_directory
from fleuve.weights.invitation import Call
from fleuve.weights.store import read_weights
from fleuve.wire.guard import bearer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def _served(
    model: Path, tmp_path: Path, **sections: dict[str, object]
) -> AsyncIterator[tuple[TrainerClient, ChildProcess]]:
    child = await ChildProcess.start(
        "trainer",
        "fleuve.train",
        {
            "settings": settings_for(model, **sections).model_dump(mode="json"),
            "weights_directory": str(make_directory(str(tmp_path / "weights"))),
            "directories": [str(tmp_path), "/nonexistent", "/dev/null"],
            "threads": 1,
        },
        tmp_path / "trainer.log",
    )
    try:
        async with TrainerClient(child.url, 60.0, child.token) as client:
            yield client, child
    finally:
        await child.stop()


@dataclass
class Standing:
    """A trainer that several tests ask, one after another: each goes on from the version that it finds."""

    client: TrainerClient
    child: ChildProcess
    directory: Path
    """In which it may read and write."""

    async def version(self) -> int:
        return int((await self.client.health())["version"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Standing]:
    directory = tmp_path_factory.mktemp("standing")
    sections = {"weights": {"transport": "broadcast"}, "trainer": {"minibatches": 2}}
    async with _served(model, directory, **sections) as (client, child):
        yield Standing(client, child, directory)


on_standing = pytest.mark.asyncio(loop_scope="module")


async def test_steps_through_the_server_are_the_trainer_s_own(model: Path, tmp_path: Path, one_thread: None) -> None:
    local = make_trainer(model, tmp_path / "local")
    async with _served(model, tmp_path) as (client, child):
        first = await client.publish()
        assert first.version == 0
        for version in range(3):
            batch = make_batch(seed=version, version=version)
            result = await client.step(batch)
            expected = local.step(batch)
            assert result.version == version + 1
            assert result.advantages == expected.advantages
            assert result.metrics["loss/policy"] == expected.metrics["loss/policy"]
        file = await client.publish(served=0)
        assert same_weights(read_weights(file), weights_of(local))
        assert read_weights(first)  # still there: the workers are at version 0

        await client.save(tmp_path / "checkpoint")
        await client.step(make_batch(seed=3, version=3))
        await client.load(tmp_path / "checkpoint")
        assert (await client.health())["version"] == 3
        await client.step(make_batch(seed=4, version=3))
        local.step(make_batch(seed=4, version=3))
        assert same_weights(read_weights(await client.publish()), weights_of(local))
        directory = Path(file.path).parent
        assert await child.stop() == 0
    assert not directory.exists()


@on_standing
async def test_a_failing_step_is_a_trainer_error_with_the_traceback_and_the_trainer_goes_on(standing: Standing) -> None:
    client, version = standing.client, await standing.version()
    with pytest.raises(TrainerError, match=r"step 78 .*the batch is for version 77(.|\n)*Traceback"):
        await client.step(make_batch(version=77))
    with pytest.raises(UserError, match=r"^/nonexistent/x is no checkpoint"):
        await client.load(Path("/nonexistent/x"))
    with pytest.raises(TrainerError, match="OSError: cannot write the checkpoint /dev/null/x") as refused:
        await client.save(Path("/dev/null/x"))
    assert "\n" not in str(refused.value)
    assert (await client.step(make_batch(version=version))).version == version + 1
    assert "Traceback" in (standing.directory / "trainer.log").read_text()


def _long_batch(version: int = 0) -> Batch:
    """Seconds of work in many micro-batches."""
    return make_batch(version=version, groups=400, size=8)


async def _until_stepping(client: TrainerClient) -> None:
    for _ in range(2000):
        if (await client.health())["busy"] == "step":
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the step never began")


@on_standing
async def test_health_answers_in_the_middle_of_a_step_and_an_interruption_ends_it(standing: Standing) -> None:
    client, version = standing.client, await standing.version()
    step = asyncio.create_task(client.step(_long_batch(version)))
    await _until_stepping(client)
    asked = time.monotonic()
    assert await standing.version() == version
    assert time.monotonic() - asked < 2.0
    await client.interrupt()
    result = await step
    assert len(result.trained) < 400
    assert result.version == version + (1 if result.trained else 0)
    assert (await client.step(make_batch(version=result.version))).version == result.version + 1


@on_standing
async def test_an_interruption_counts_from_the_moment_the_step_is_asked_for_and_for_that_step_alone(
    standing: Standing,
) -> None:
    client, version = standing.client, await standing.version()
    await client.interrupt()  # of nothing
    whole = await client.step(make_batch(version=version))
    assert len(whole.trained) == len(make_batch().groups)
    await client.interrupt()  # too late

    step = asyncio.create_task(client.step(make_batch(version=version + 1)))
    await asyncio.sleep(0)  # begun, and nothing sent yet
    await client.interrupt()
    result = await step
    assert (result.trained, result.version) == ([], version + 1)
    assert len((await client.step(make_batch(version=version + 1))).trained) == len(whole.trained)


@on_standing
async def test_an_interruption_while_the_batch_is_uploaded_ends_its_step_and_no_other(standing: Standing) -> None:
    client, child, version = standing.client, standing.child, await standing.version()
    body, uploading, go_on = encode(make_batch(version=version)), asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:1000]
        uploading.set()
        await go_on.wait()
        yield body[1000:]

    async with aiohttp.ClientSession(child.url, headers=bearer(child.token)) as session:

        async def upload() -> StepResult:
            async with session.post("/step?id=mine", data=slowly()) as response:
                return decode(await response.read(), StepResult)

        step = asyncio.create_task(upload())
        await uploading.wait()
        async with session.post("/interrupt", json={"id": "mine"}) as response:
            assert response.status == 200
        go_on.set()
        result = await step
        assert (result.trained, result.version) == ([], version)
        assert (await client.step(make_batch(version=version))).version == version + 1


async def test_waiting_for_the_trainer_ends_by_the_deadline_and_at_once_when_it_dies(
    model: Path, tmp_path: Path
) -> None:
    async with _served(model, tmp_path, control={"batch_size": 400}) as (client, child):
        async with TrainerClient(child.url, 0.2, child.token) as hurried:
            with pytest.raises(TrainerError, match=r"no answer to step 1 \(400 groups\) within 0.2 s"):
                await hurried.step(_long_batch())
        step = asyncio.create_task(client.step(_long_batch()))
        await _until_stepping(client)
        child.kill()
        with pytest.raises(TrainerError, match="step 1"):
            await asyncio.wait_for(step, 10)


@on_standing
async def test_who_does_not_know_the_token_or_names_other_files_is_turned_away(standing: Standing) -> None:
    client, child, directory = standing.client, standing.child, standing.directory
    version = await standing.version()
    async with aiohttp.ClientSession(child.url) as stranger:
        for path in ("/step", "/publish", "/save", "/load", "/interrupt", "/broadcast", "/lose"):
            async with stranger.post(path, data=b"{}") as response:
                assert response.status == 401, path
        async with stranger.get("/broadcast") as response:
            assert response.status == 401
        async with stranger.get("/health") as response:
            assert await response.json() == {}
    (directory / "link").symlink_to("/etc")
    for path in ("/etc/x", f"{directory}/../x", f"{directory}/link/x", str(directory)):
        with pytest.raises(TrainerError, match="outside of what this server may use"):
            await client.save(Path(path))
        with pytest.raises(TrainerError, match="outside of what this server may use"):
            await client.load(Path(path))
    file = WeightFile(version=1, path=str(directory / "config.json"), bytes=1, checksum="crc32:00000000")
    with pytest.raises(TrainerError, match="outside of what this server may use"):
        await client.broadcast(Call(number=1, weights=file, members={"a": 1}))
    async with aiohttp.ClientSession(child.url, headers=bearer(child.token)) as clumsy:
        for path, body in (
            ("/save", b"[" * 100_000),
            ("/save", b"{}"),
            ("/publish", b""),
            ("/step", b"\x91" * 1000),
            ("/broadcast", b"\x91" * 1000),
            ("/lose", b""),
        ):
            async with clumsy.post(path, data=body) as response:
                assert response.status == 400, (path, body[:9])
        async with clumsy.post("/pause", data=b"{}", headers={"Origin": "https://elsewhere.example"}) as response:
            assert response.status == 403
    assert (await client.step(make_batch(version=version))).version == version + 1


@on_standing
async def test_what_was_published_is_broadcast_while_a_step_goes_on(standing: Standing) -> None:
    client, version = standing.client, await standing.version()
    file, hall = await client.publish(), await client.hall()
    step = asyncio.create_task(client.step(_long_batch(version)))
    await _until_stepping(client)
    invitation = Invitation(address=hall.address, key=hall.key, number=1, member="a", seconds=20.0)
    nowhere = WeightFile(version=file.version, path="/nowhere", bytes=file.bytes, checksum=file.checksum)
    receiving = asyncio.to_thread(Receiver().read, nowhere, invitation)
    got, _ = await asyncio.gather(receiving, client.broadcast(Call(number=1, weights=file, members={"a": 1})))
    assert not step.done()
    want = read_weights(file)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    await client.interrupt()
    await step


async def test_told_to_it_ends_within_a_second_though_a_broadcast_waits_for_somebody(
    model: Path, tmp_path: Path
) -> None:
    async with _served(model, tmp_path, weights={"transport": "broadcast"}) as (client, child):
        file = await client.publish()
        call = asyncio.create_task(client.broadcast(Call(number=1, weights=file, members={"nobody": 1})))
        await client.step(make_batch())
        told = time.monotonic()
        assert await child.stop() == 0
        assert time.monotonic() - told < 1.0
        with pytest.raises(TrainerError):
            await call
    assert not list((tmp_path / "weights").iterdir())


async def test_the_weights_vanish_with_a_killed_parent(model: Path, tmp_path: Path) -> None:
    """SIGKILL for the parent, in the middle of everything: neither the trainer nor its directory survives."""
    directory = make_directory(str(tmp_path / "weights"))
    code = (
        "import asyncio, json, sys; from pathlib import Path; from fleuve.launch.process import ChildProcess\n"
        "async def main():\n"
        "    child = await ChildProcess.start('trainer', 'fleuve.train', json.loads(sys.argv[1]), Path(sys.argv[2]))\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    options = {"settings": settings_for(model).model_dump(mode="json"), "weights_directory": str(directory)}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, json.dumps(options), str(tmp_path / "t.log"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    assert directory.exists()
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    for _ in range(200):
        if not directory.exists() and not _alive(pid):
            break
        await asyncio.sleep(0.05)
    assert not directory.exists()
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_the_client_imports_no_torch() -> None:
    code = "import sys, fleuve.train.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
