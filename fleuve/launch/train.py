"""`fleuve train`: puts the pieces together, runs the controller, and ends cleanly however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from fleuve.config.loader import dump_settings
from fleuve.config.settings import Settings
from fleuve.contracts import RolloutError, RunError, Trainer, TrainerError
from fleuve.control.controller import Controller
from fleuve.control.fleet import Fleet
from fleuve.data.open import open_source
from fleuve.errors import UserError
from fleuve.evaluate.in_run import in_run_evaluation
from fleuve.launch.checkpoints import Checkpoints
from fleuve.launch.local import System, start
from fleuve.launch.process import ChildError
from fleuve.modeling.tokenizer import load_tokenizer
from fleuve.observe.lag import watch_lag
from fleuve.observe.observer import RunObserver
from fleuve.observe.rundir import RunDirectory, create_run_directory
from fleuve.rewards.pool import RewardPool
from fleuve.rewards.process import CrashError
from fleuve.rollout.workflow import SingleTurn

EXPECTED = (RunError, RolloutError, TrainerError, ChildError, CrashError, OSError)
"""What can end a run without a fault in Fleuve: one message, exit code 1."""

STEP_GRACE = 4.0
"""Seconds after Ctrl-C for which the step in progress may go on before it is cut short."""

INTERRUPTED = 130


class Stop:
    """Ctrl-C: the first ends the run after its step (cut short after `STEP_GRACE`), the second ends it at once."""

    def __init__(self, main: asyncio.Task[int]) -> None:
        self.asked = False
        self._main = main
        self._controller: Controller | None = None
        self._trainer: Trainer | None = None
        self._cut: asyncio.Task[None] | None = None

    def watch(self, controller: Controller, trainer: Trainer) -> None:
        """From here on there is something to end cleanly."""
        self._controller, self._trainer = controller, trainer

    def ask(self) -> None:
        """The signal handler."""
        if self.asked or self._controller is None:
            self._main.cancel()
        else:
            self._controller.stop()
            self._cut = asyncio.get_running_loop().create_task(self._cut_short())
        self.asked = True

    async def _cut_short(self) -> None:
        await asyncio.sleep(STEP_GRACE)
        assert self._trainer is not None
        await self._trainer.interrupt()

    async def close(self) -> None:
        """The run has ended: nothing is left to cut short."""
        if self._cut is not None:
            self._cut.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._cut


def run_training(settings: Settings) -> int:
    """Train; the exit code: 0 done, 1 failed, 130 interrupted (with a checkpoint).

    Raises:
        UserError: the settings cannot be run.
    """
    try:
        return asyncio.run(_train(settings))
    except Exception as error:
        leaf = _first_leaf(error)
        if isinstance(leaf, UserError):
            raise leaf from None
        if isinstance(leaf, EXPECTED):
            print(f"error: {leaf}", file=sys.stderr)
            return 1
        raise


def _first_leaf(error: BaseException) -> BaseException:
    """The first plain exception inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _train(settings: Settings) -> int:
    main = asyncio.current_task()
    assert main is not None
    stop = Stop(main)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.ask)
    run = create_run_directory(settings.run_dir, dump_settings(settings))
    try:
        with RunObserver(run, settings) as observer:
            await _run(settings, run, observer, stop)
    except asyncio.CancelledError:
        if not stop.asked:
            raise
    finally:
        await stop.close()
        run.release()
    return INTERRUPTED if stop.asked else 0


async def _run(settings: Settings, run: RunDirectory, observer: RunObserver, stop: Stop) -> None:
    """Start every process, train, save."""
    observer.note("starting the trainer, the rollout workers and the verifiers")
    tokenizer = load_tokenizer(settings.model.path)
    source = open_source(settings.data.train, settings.data, tokenizer, settings.seed)
    async with (
        start(settings, run.logs) as system,
        RewardPool(settings.reward, [settings.data.verifier], run.logs / "rewards.log") as rewards,
    ):
        fleet = Fleet(system.engines, settings.seed)
        workflow = SingleTurn(
            settings.rollout,
            settings.seed,
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            rewards,
        )
        checkpoints = Checkpoints(run.checkpoints, settings.checkpoint.keep)

        async def checkpoint(version: int) -> None:
            path = await checkpoints.save(version, system.trainer, {"version": version, **controller.state()})
            observer.note(f"checkpoint {path}")

        controller = Controller(
            settings,
            source,
            workflow,
            fleet,
            system.trainer,
            observer,
            evaluate=in_run_evaluation(settings, tokenizer, fleet, rewards),
            checkpoint=checkpoint,
        )
        stop.watch(controller, system.trainer)
        await _until_done_or_dead(controller, system, observer)
        await stop.close()
        observer.note(f"{'stopped' if stop.asked else 'done'} at version {controller.version}; saving")
        await checkpoint(controller.version)


async def _until_done_or_dead(controller: Controller, system: System, observer: RunObserver) -> None:
    """Run the controller; the death of a process ends it at once, with that process's last words as the reason."""
    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(system.watch()), tasks.create_task(watch_lag(observer))]
        await controller.run()
        for watch in watches:
            watch.cancel()
