"""`fleuve train`: puts the pieces together, runs the controller, and ends cleanly however it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

from fleuve.config.loader import dump_settings
from fleuve.config.models import inspect_model
from fleuve.config.settings import Settings
from fleuve.contracts import RolloutError, RunError, TrainerError
from fleuve.control.controller import Controller
from fleuve.control.fleet import Fleet
from fleuve.data.open import open_source
from fleuve.data.source import RowSource
from fleuve.errors import UserError
from fleuve.evaluate.in_run import in_run_evaluation
from fleuve.launch.background import in_background
from fleuve.launch.checkpoints import Checkpoints
from fleuve.launch.local import System, fleet_policy, start
from fleuve.launch.process import ChildError
from fleuve.launch.stop import Stop
from fleuve.modeling.tokenizer import answer_decoder, load_tokenizer
from fleuve.observe.lag import watch_lag
from fleuve.observe.observer import RunObserver
from fleuve.observe.rundir import RunDirectory, create_run_directory
from fleuve.rewards.open import open_rewarder
from fleuve.rewards.process import CrashError
from fleuve.rollout.workflow import SingleTurn

EXPECTED = (RunError, RolloutError, TrainerError, ChildError, CrashError, OSError)
"""What can end a run without a fault in Fleuve: one message, exit code 1."""

LAST_WORDS = 1.0
"""Seconds for which a lost connection waits for the news that the process behind it died, which says more."""

RESCUE = 60.0
"""Seconds for a checkpoint of a run that failed."""

INTERRUPTED = 130


def run_training(settings: Settings) -> int:
    """Train; the exit code: 0 done, 1 failed, 130 interrupted (with a checkpoint).

    Raises:
        UserError: the settings cannot be run.
    """
    try:
        return asyncio.run(_train(settings))
    except Exception as error:
        leaf = _reason(error)
        if isinstance(leaf, UserError):
            raise leaf from None
        if isinstance(leaf, EXPECTED):
            print(f"error: {leaf}", file=sys.stderr)
            return 1
        raise


def _reason(error: BaseException) -> BaseException:
    """Of the plain exceptions in nested groups, the one to report: a fault of ours before all, then a process's death,
    which explains the connections lost to it, then whatever came first."""
    leaves = _leaves(error)
    faults = [leaf for leaf in leaves if not isinstance(leaf, (*EXPECTED, UserError))]
    deaths = [leaf for leaf in leaves if isinstance(leaf, ChildError)]
    return [*faults, *deaths, *leaves][0]


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


async def _train(settings: Settings) -> int:
    main = asyncio.current_task()
    assert main is not None
    stop = Stop(main)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.ask)
    run = create_run_directory(settings.run_dir, dump_settings(settings))
    try:
        with RunObserver(run, settings) as observer:
            await _run(settings, run, observer, stop)
    except asyncio.CancelledError:
        if not stop.asked:
            raise
    except Exception as error:
        # At once means that the processes were killed: what their lost connections say of it is no news.
        if not (stop.at_once and isinstance(_reason(error), EXPECTED)):
            raise
    finally:
        run.release()
    return INTERRUPTED if stop.asked else 0


def _open_data(settings: Settings) -> tuple[Any, RowSource]:
    """The tokenizer and the prompts.

    Raises:
        UserError: one of them cannot be had.
    """
    try:
        tokenizer = load_tokenizer(settings.model.path)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.path = {settings.model.path}: its tokenizer cannot be loaded: {reason}") from None
    return tokenizer, open_source(settings.data.train, settings.data, tokenizer, settings.seed)


async def _run(settings: Settings, run: RunDirectory, observer: RunObserver, stop: Stop) -> None:
    """Start every process, train, save."""
    observer.note("starting the trainer, the rollout workers and the verifiers")
    tokenizer, source = await in_background(lambda: _open_data(settings))
    async with (
        start(settings, run.logs) as system,
        open_rewarder(
            settings.reward, [settings.data.verifier, *source.verifiers], run.logs / "rewards.log"
        ) as rewards,
    ):
        observer.also(rewards.metrics)
        fleet = Fleet(
            system.engines.clients,
            settings.seed,
            supervisor=system.engines,
            policy=fleet_policy(settings.rollout),
            observer=observer,
            vocabulary=inspect_model(settings.model.path).vocabulary,
        )
        observer.also(fleet.gauges)
        workflow = SingleTurn(
            settings.rollout,
            settings.seed,
            answer_decoder(tokenizer),
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
        stop.controls(controller, system.trainer, lambda: system.children)
        try:
            await _until_done_or_dead(controller, system, observer)
        except Exception:
            await stop.run_has_ended()
            # What was trained is kept, if a trainer holds it. The error told is the one that ended the run.
            if system.trainer_process.alive and controller.version > 0 and not stop.at_once:
                observer.note(f"failed at version {controller.version}; saving")
                try:
                    async with asyncio.timeout(RESCUE):
                        await checkpoint(controller.version)
                except (*EXPECTED, TimeoutError) as error:
                    observer.note(f"not saved: {error}")
            raise
        await stop.run_has_ended()
        observer.note(f"{'stopped' if stop.asked else 'done'} at version {controller.version}; saving")
        await checkpoint(controller.version)


async def _until_done_or_dead(controller: Controller, system: System, observer: RunObserver) -> None:
    """Run the controller; the death of a process ends it at once, with that process's last words as the reason."""
    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(system.watch()), tasks.create_task(watch_lag(observer))]
        try:
            await controller.run()
        except* (RolloutError, TrainerError):
            await asyncio.sleep(LAST_WORDS)
            raise
        for watch in watches:
            watch.cancel()
