"""`fleuve train`: puts the pieces together, runs the controller, and ends cleanly however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from typing import Any

from fleuve.config.loader import dump_settings
from fleuve.config.models import inspect_model
from fleuve.config.settings import Settings
from fleuve.contracts import RolloutError, RunError, TrainerError
from fleuve.control.controller import Controller
from fleuve.control.fleet import Fleet
from fleuve.data.open import open_source
from fleuve.data.source import RowSource
from fleuve.ending import leave
from fleuve.errors import UserError
from fleuve.evaluate.in_run import in_run_evaluation
from fleuve.launch.background import in_background
from fleuve.launch.checkpoints import Checkpoints
from fleuve.launch.host import HostLostError
from fleuve.launch.journal import JournalFile
from fleuve.launch.left import what_is_left
from fleuve.launch.local import System, fleet_policy, start
from fleuve.launch.orders import take_orders
from fleuve.launch.process import ChildError
from fleuve.launch.resume import Opened, finished, open_run
from fleuve.launch.saver import Saver
from fleuve.launch.settle import settle
from fleuve.launch.stop import Stop
from fleuve.modeling.tokenizer import answer_decoder, load_tokenizer
from fleuve.observe.lag import watch_lag
from fleuve.observe.observer import RunObserver
from fleuve.observe.remake import Remake
from fleuve.observe.rundir import RunDirectory
from fleuve.rewards.open import open_rewarder
from fleuve.rewards.process import CrashError
from fleuve.rollout.workflow import SingleTurn
from fleuve.signals import INTERRUPTED, signals

EXPECTED = (RunError, RolloutError, TrainerError, ChildError, CrashError, HostLostError, OSError)
"""What can end a run without a fault in Fleuve: one message, exit code 1."""

LAST_WORDS = 1.0
"""Seconds for which a lost connection waits for the news that the process behind it died, which says more."""

RESCUE = 60.0
"""Seconds for a checkpoint of a run that failed."""


def run_training(settings: Settings, resume: str = "auto") -> int:
    """Train; the exit code: 0 done, 1 failed, 130 interrupted (with a checkpoint). `resume`: see `resume.open_run`.

    Raises:
        UserError: the settings cannot be run.
    """
    try:
        return asyncio.run(_train(settings, resume))
    except Exception as error:
        leaf = _reason(error)
        if isinstance(leaf, UserError):
            raise leaf from None
        if isinstance(leaf, EXPECTED):
            print(f"error: {leaf}", file=sys.stderr)
            print(what_is_left(RunDirectory(settings.run_dir)), file=sys.stderr)
            if isinstance(leaf, HostLostError):
                leave(1)  # what its library has going cannot be ended without it
            return 1
        raise


def _reason(error: BaseException) -> BaseException:
    """Of the plain exceptions in nested groups, the one to report: the loss of the host, which explains all others; a
    fault of ours; a process's death, which explains the connections lost to it; then whatever came first."""
    leaves = _leaves(error)
    lost = [leaf for leaf in leaves if isinstance(leaf, HostLostError)]
    faults = [leaf for leaf in leaves if not isinstance(leaf, (*EXPECTED, UserError))]
    deaths = [leaf for leaf in leaves if isinstance(leaf, ChildError)]
    return [*lost, *faults, *deaths, *leaves][0]


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


async def _train(settings: Settings, resume: str) -> int:
    main = asyncio.current_task()
    assert main is not None
    stop = Stop(main)
    loop = asyncio.get_running_loop()
    signals.install()
    signals.answer(lambda: loop.call_soon_threadsafe(stop.ask), lambda: loop.call_soon_threadsafe(stop.save))
    if signals.save_asked:
        stop.save()
    try:
        return await _found(settings, resume, stop)
    finally:
        signals.unanswered()  # the loop is about to end


async def _found(settings: Settings, resume: str, stop: Stop) -> int:
    """What there is to do is done."""
    if resume == "auto" and finished(settings):
        print(
            f"the run in {settings.run_dir} has made its {settings.steps} steps: with more --steps it goes on, with "
            "--resume no another begins"
        )
        return 0
    opened: Opened | None = None
    try:
        opened = await in_background(lambda: open_run(settings, resume))
        with RunObserver(opened.run, settings, earlier=opened.earlier) as observer:
            await _run(settings, opened, observer, stop)
    except asyncio.CancelledError:
        if not stop.asked:
            raise
    except Exception as error:
        # At once means that the processes were killed: what their lost connections say of it is no news.
        if not (stop.at_once and isinstance(_reason(error), EXPECTED)):
            raise
    finally:
        if opened is not None:
            opened.run.release()
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


async def _run(settings: Settings, opened: Opened, observer: RunObserver, stop: Stop) -> None:
    """Start every process, bring them to where the run was, train, save."""
    run = opened.run
    for note in opened.words():
        observer.note(note)
    observer.note("starting the trainer, the rollout workers and the verifiers")
    tokenizer, source = await in_background(lambda: _open_data(settings))
    reading = await in_background(lambda: opened.history.open(source, whole=settings.reproducible))
    async with (
        start(settings, run.logs, opened.history, observer.note, opened.former or settings) as system,
        open_rewarder(
            settings.reward, [settings.data.verifier, *source.verifiers], run.logs / "rewards.log"
        ) as rewards,
    ):
        trainer = system.trainer
        for gauges in (rewards.metrics, trainer.gauges):
            observer.also(gauges)
        if system.broadcasts is not None:
            observer.also(system.broadcasts.gauges)
        fleet = Fleet(
            system.engines.clients,
            settings.seed,
            supervisor=system.engines,
            policy=fleet_policy(settings.rollout),
            observer=observer,
            vocabulary=inspect_model(settings.model.path).vocabulary,
        )
        observer.also(fleet.gauges)
        await trainer.bring_up(reading, Remake(settings, observer, opened.earlier.steps))
        if opened.continued:
            again = f"; {reading.steps} steps were made again from what was generated for them" if reading.steps else ""
            observer.note(f"it is at version {reading.version}{again}")
            for note in await in_background(lambda: settle(run, reading)):
                observer.note(note)
        journal = JournalFile(run.journal, reading.next, observer.note)
        checkpoints = Checkpoints(run.checkpoints, settings.checkpoint.keep)
        saver = Saver(checkpoints, trainer, journal, observer.note)
        controller = Controller(
            settings,
            source,
            SingleTurn(settings.rollout, settings.seed, answer_decoder(tokenizer), rewards),
            fleet,
            trainer,
            observer,
            evaluate=in_run_evaluation(settings, tokenizer, fleet, rewards),
            checkpoint=lambda version: saver.save_or_note(version, controller.snapshot()),
            journal=journal,
            past=reading.past,
        )
        if opened.former is not None:
            if reading.steps:
                await saver.save(controller.version, controller.snapshot())
            await trainer.change(lambda: system.start_trainer(settings))
        run.write_config(dump_settings(settings))
        if controller.version or settings.rollout.urls:  # servers of the user's may have any weights
            await fleet.update(await trainer.publish(0), "recompute")
        stop.controls(controller, trainer, lambda: system.children)
        try:
            await _until_done_or_dead(controller, system, observer, take_orders(run.root, fleet))
        except Exception:
            await stop.run_has_ended()
            # What was trained is kept, if a trainer holds it. The error told is the one that ended the run.
            if trainer.alive and controller.version > 0 and not controller.cut and not stop.at_once:
                observer.note(f"failed at version {controller.version}; saving")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RESCUE):
                        await saver.save_or_note(controller.version, controller.snapshot())
            raise
        finally:
            journal.close()
        await stop.run_has_ended()
        observer.note(f"{'stopped' if stop.asked else 'done'} at version {controller.version}; saving")
        if controller.cut or not trainer.alive:
            observer.note("the step in progress was cut short: it is made anew when the run is started again")
        else:
            await saver.save(controller.version, controller.snapshot())


async def _until_done_or_dead(
    controller: Controller, system: System, observer: RunObserver, orders: Coroutine[Any, Any, None]
) -> None:
    """Run the controller. Processes that die are replaced beside it; one that cannot be ends it."""
    async with asyncio.TaskGroup() as tasks:
        loops = system.trainer.tend(), watch_lag(observer), orders
        beside = [tasks.create_task(loop) for loop in loops]
        try:
            await controller.run()
        except* (RolloutError, TrainerError):
            await asyncio.sleep(LAST_WORDS)
            raise
        for task in beside:
            task.cancel()
