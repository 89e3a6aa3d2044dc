"""Numbers of parts that the controller knows nothing of stand in the same rows."""

from pathlib import Path

from fleuve.config.settings import Settings
from fleuve.observe.metrics import read_metrics
from fleuve.observe.observer import RunObserver
from fleuve.observe.rundir import create_run_directory
from fleuve.types import Batch


def test_what_was_registered_is_read_at_every_step(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": "m"},
            "data": {"train": "d"},
            "observe": {"live": "off", "tensorboard": False},
        }
    )
    run = create_run_directory(settings.run_dir, "")
    checks = iter([3.0, 5.0])
    with RunObserver(run, settings) as observer:
        observer.also(lambda: {"reward_service/checks": next(checks)})
        for step in (1, 2):
            observer.step({"step": float(step), "time/step": 1.0}, Batch(version=step, groups=[]))
    run.release()
    assert [row["reward_service/checks"] for row in read_metrics(run.metrics)] == [3.0, 5.0]
