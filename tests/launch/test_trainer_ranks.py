"""A trainer of two real ranks, as who supervises it sees it: one process, that is lost when any of them is."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from fleuve.config.settings import Settings
from fleuve.contracts import TrainerError
from fleuve.errors import UserError
from fleuve.launch.host import LOCAL
from fleuve.launch.placement import Place
from fleuve.launch.process import ChildError
from fleuve.launch.ranks import TrainerRanks, start_ranks
from fleuve.train.client import TrainerClient

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

SPOT = Place(None, 1)


def _settings(model: str, run: Path, **trainer: object) -> Settings:
    from tiny import settings_for

    trainer = {"ranks": 2, "learning_rate": 1e-3, "token_budget": 64, "minibatches": 2, "device": "cpu"} | trainer
    settings = settings_for(Path(model), trainer=trainer)
    return settings.model_copy(update={"run_dir": str(run), "model": settings.model.model_copy(update={"path": model})})


@asynccontextmanager
async def _running(settings: Settings, tmp: Path) -> AsyncIterator[tuple[TrainerRanks, TrainerClient]]:
    options = {"settings": settings.model_dump(mode="json"), "weights_directory": str(tmp / "weights")}
    trainer = await start_ranks(settings, options, tmp / "logs", [SPOT] * settings.trainer.ranks, LOCAL)
    assert isinstance(trainer, TrainerRanks)
    try:
        async with TrainerClient(trainer.url, 120.0, trainer.token) as client:
            yield trainer, client
    finally:
        await trainer.stop(0.0)


async def _a_stranger_is_told_nothing_and_obeyed_in_nothing(trainer: TrainerRanks) -> None:
    for member in trainer.members:
        async with TrainerClient(member.url, 30.0) as stranger:
            assert await stranger.health() == {}
            with pytest.raises(TrainerError, match="token"):
                await stranger.meet({"address": "127.0.0.1:1", "secret": ""})
        assert "secret" not in " ".join(psutil.Process(member.pid).cmdline())


async def test_ranks_answer_as_one_trainer_and_are_lost_as_one(tmp_path: Path) -> None:
    """Steps, errors that all ranks have alike, a checkpoint, a publication; then one rank is killed while idle."""
    from tiny import make_batch, save_tiny_model

    settings = _settings(str(save_tiny_model(tmp_path / "model")), tmp_path)
    async with _running(settings, tmp_path) as (trainer, client):
        assert (await client.step(make_batch())).version == 1
        with pytest.raises(TrainerError, match="the batch is for version 0, the trainer holds version 1"):
            await client.step(make_batch())
        with pytest.raises(UserError, match="is no checkpoint"):
            await client.load(tmp_path / "nothing")
        (tmp_path / "file").write_text("")
        with pytest.raises(TrainerError, match="cannot write the checkpoint"):
            await client.save(tmp_path / "file" / "checkpoint")
        await client.save(tmp_path / "checkpoint")
        await client.load(tmp_path / "checkpoint")
        assert (await client.publish()).version == 1
        assert (await client.step(make_batch(version=1))).version == 2
        assert trainer.alive
        assert {p.name for p in (tmp_path / "logs").iterdir()} == {"trainer.log", "trainer-1.log"}
        await _a_stranger_is_told_nothing_and_obeyed_in_nothing(trainer)

        first, second = trainer.members
        os.kill(second.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            assert "trainer-1" in str(await trainer.died())
        assert not trainer.alive
        with pytest.raises(TrainerError):
            await client.step(make_batch(version=2))
        assert await first.wait() != 0  # it does not live on without the other


@pytest.mark.slow
async def test_a_rank_that_stands_still_counts_as_lost(tmp_path: Path) -> None:
    from tiny import save_tiny_model

    settings = _settings(str(save_tiny_model(tmp_path / "model")), tmp_path, health_timeout=4.0)
    async with _running(settings, tmp_path) as (trainer, _):
        os.kill(trainer.members[1].pid, signal.SIGSTOP)
        began = time.monotonic()
        async with asyncio.timeout(30):
            assert "trainer-1 hangs" in str(await trainer.died())
        assert time.monotonic() - began < 20


@pytest.mark.slow
async def test_a_model_that_cannot_be_opened_is_said_once_and_no_rank_is_left(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    settings = _settings(str(tmp_path / "model"), tmp_path)
    with pytest.raises(ChildError, match=r"trainer.* died"):
        async with _running(settings, tmp_path):
            pass
    assert "cannot open the model" in (tmp_path / "logs" / "trainer.log").read_text()
