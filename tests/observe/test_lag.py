"""A blocked event loop is seen (pitfall 22)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from fleuve.config.settings import Settings
from fleuve.observe.lag import watch_lag
from fleuve.observe.observer import RunObserver
from fleuve.observe.rundir import create_run_directory


async def test_what_blocks_the_loop_is_noted_with_its_seconds(tmp_path: Path) -> None:
    values = {"run_dir": str(tmp_path / "run"), "model": {"path": "m"}, "data": {"train": "d"}}
    settings = Settings.model_validate({**values, "observe": {"live": "off", "tensorboard": False}})
    run = create_run_directory(settings.run_dir, "")
    with RunObserver(run, settings) as observer:
        watch = asyncio.create_task(watch_lag(observer, every=0.02, note_above=0.2))
        await asyncio.sleep(0.1)
        assert run.log.read_text() == ""
        time.sleep(0.4)  # noqa: ASYNC251 - the offence itself
        await asyncio.sleep(0.1)
        watch.cancel()
    assert "event loop was blocked for 0." in run.log.read_text()
    assert "controller/loop_lag" in run.trace.read_text()
