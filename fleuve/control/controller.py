"""The asynchronous heart: prompts through the gate to the fleet, answers to the buffer, batches to the trainer, weights
back to the fleet. Three loops that never wait for each other except through the gate's slots.

    admit:    prompt ─▶ gate ─▶ group's episode on a worker ─▶ ready
    train:    ready ─▶ batch ─▶ trainer ─▶ new version
    deliver:  newest version ─▶ every worker ─▶ slots are freed

Pure asyncio: time is the event loop's, and the fleet, the trainer and the rewards are whatever speaks `contracts`, so
that the simulator drives this very code on virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from fleuve.config.settings import Settings
from fleuve.contracts import (
    Observer,
    PromptSource,
    RolloutError,
    RunError,
    Trainer,
    TrainerError,
    Workflow,
)
from fleuve.control.answers import AnswerBook
from fleuve.control.delivery import Delivery, Evaluation
from fleuve.control.dynamic_sampling import DynamicSampling, compared, has_signal
from fleuve.control.failures import Failures, check_finite
from fleuve.control.fleet import Fleet
from fleuve.control.garbage import seldom_collected
from fleuve.control.gate import Gate
from fleuve.control.journal import Admitted, Dropped, Evaluated, Journal, NoJournal, Record, ready, stepped
from fleuve.control.past import Past, snapshot
from fleuve.control.reporting import Reporter
from fleuve.control.resumption import resumption
from fleuve.control.saving import Saving
from fleuve.control.signal import Signal
from fleuve.control.verdicts import exclude_nonfinite
from fleuve.control.wave import Waves
from fleuve.types import Batch, Group, Prompt, StepResult

Checkpoint = Callable[[int], Awaitable[None]]
"""Saves the run as of a version."""


class Controller:
    """One training run. `version` is how many steps are done. With a `past` the run goes on from there; trainer and
    fleet must have that version."""

    def __init__(
        self,
        settings: Settings,
        source: PromptSource,
        workflow: Workflow,
        fleet: Fleet,
        trainer: Trainer,
        observer: Observer,
        evaluate: Evaluation | None = None,
        checkpoint: Checkpoint | None = None,
        journal: Journal | None = None,
        past: Past | None = None,
    ) -> None:
        past = past or Past()
        self.version = past.version
        self.gate = Gate(settings.control.batch_size, settings.control.max_staleness, past.version)
        self._settings = settings
        self._source = source
        self._workflow = workflow
        self._fleet = fleet
        self._trainer = trainer
        self._observer = observer
        self._checkpoint = checkpoint
        self._journal = journal or NoJournal()
        self._saving = Saving(settings.checkpoint)
        self._waves = Waves(fleet, settings.rollout.group_size) if settings.reproducible else None
        self._before_wave: list[Record] = []
        self.cut = False
        """A step was cut short, and does not count: what the trainer holds now belongs to no version."""
        self._signal = Signal()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._reported_evaluation = past.evaluated
        self._stopping = False
        self._failures = Failures(past.failures.attempts)
        self._dynamic_sampling = DynamicSampling(settings.control.batch_size, past.without_signal)
        self._reporter = Reporter(observer, self.gate)
        self._delivery = Delivery(
            settings, self.gate, fleet, observer, self._reporter, self._signal, evaluate, past.evaluated
        )
        self._last_step_at = 0.0
        # Waves are computed in the same course again only if they are sampled as a whole.
        keep = journal is not None and self._waves is None
        resumed = resumption(past, settings.control, use_answers=keep)
        self._answers = AnswerBook(self._journal.write if keep else None, resumed.answers)
        self._ready, self._prompts = resumed.ready, resumed.prompts
        self.gate.resume(past.admitted, past.trained, past.dropped, resumed.live)
        for group in self._ready.values():
            self.gate.finish(group.id, group.oldest_version)
        self._to_run = dict.fromkeys(i for i in self._prompts if i not in self._ready)

    # --- the life of a run ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until `settings.steps` versions are made or `stop` is called.

        Raises:
            ExceptionGroup: of what went wrong in any of the loops: RunError, RolloutError, TrainerError, or a fault.
        """
        self._last_step_at = self._now()
        self._saving.begun(self._now())
        if summary := self._answers.summary():
            self._observer.note(summary)
        with seldom_collected():
            async with asyncio.TaskGroup() as tasks:
                others = self._admit(tasks), self._delivery.run(), self._reporter.watch(self._fleet), self._fleet.tend()
                loops = [tasks.create_task(loop) for loop in others]
                await self._train()
                for task in [*loops, *self._running.values()]:
                    task.cancel()

    def stop(self) -> None:
        """End the run after the step in progress; what is admitted and not trained stays in `pending`."""
        self._stopping = True
        self._signal.notify()

    def pending(self) -> list[Prompt]:
        """Prompts admitted and neither trained nor dropped."""
        return list(self._prompts.values())

    def save_soon(self) -> None:
        """Make a checkpoint as soon as no step is in progress, and go on."""
        self._saving.asked = True
        self._signal.notify()

    def snapshot(self) -> list[Record]:
        """What a checkpoint keeps of the controller: see `past.snapshot`. Of a wave, what there was before it: it is
        computed in the same course again only if all of it is."""
        return self._before_wave if self._before_wave and self._running else self._snapshot()

    def _snapshot(self) -> list[Record]:
        return snapshot(
            self.gate,
            self.version,
            self._source,
            self._prompts,
            self._ready.values(),
            answers=self._answers.records(),
            evaluated=self._reported_evaluation,
            next_record=self._journal.next,
            attempts=self._failures.attempts,
            without_signal=self._dynamic_sampling.without_signal,
        )

    # --- admit ------------------------------------------------------------------------------------------------------

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._signal.until(self._may_admit)
            if self._waves is None:
                self._start_group(tasks)
                await asyncio.sleep(0)
            else:
                await self._waves.admit(lambda: self._start_groups(tasks))

    def _may_admit(self) -> bool:
        """A slot is free, and the steps that are left need another group. A wave begins when the one before has ended,
        and nothing else is asked of the workers."""
        if self._stopping:
            return False
        delivery = self._delivery
        if self._waves is not None and (self._running or delivery.busy or delivery.held or delivery.due):
            return False
        return self._room()

    def _room(self) -> bool:
        needed = (self._settings.steps - self.version) * self._settings.control.batch_size
        return bool(self._to_run) or (self.gate.free > 0 and len(self._prompts) < needed)

    def _start_groups(self, tasks: asyncio.TaskGroup) -> int:
        """All that may be; how many."""
        self._before_wave = self._snapshot()
        count = 0
        while self._room():
            self._start_group(tasks)
            count += 1
        return count

    def _start_group(self, tasks: asyncio.TaskGroup) -> None:
        """One that an earlier run had admitted, or a new one."""
        if self._to_run:
            group = next(iter(self._to_run))
            del self._to_run[group]
        else:
            prompt = self._source.next()
            group = self.gate.admit()
            self._journal.write(Admitted(group=group, prompt=prompt, version=self.gate.served_version))
            self._prompts[group] = prompt
        self._running[group] = tasks.create_task(self._run_group(group, self._prompts[group]))

    async def _run_group(self, group: int, prompt: Prompt) -> None:
        """One group's episode, from admission to ready or dropped."""
        admitted_version, admitted_at = self.gate.served_version, self._now()
        settings = self._settings
        limit = settings.control.group_timeout + settings.longest_pause
        try:
            answers = self._answers.left(group, settings.rollout.group_size)
            async with asyncio.timeout(limit), self._fleet.worker(answers) as lease:
                sampler = self._waves.sampler(lease) if self._waves else self._answers.open(group, lease)
                trajectories = await self._workflow.run(sampler, prompt, group)
        except TimeoutError:
            self._fail(group, "timeout", f"not done within {limit:g} s")
        except RolloutError as error:
            self._fail(group, "rollout failed", str(error))
        else:
            exclude_nonfinite(trajectories)
            done = Group(
                id=group,
                prompt=prompt,
                trajectories=trajectories,
                admitted_version=admitted_version,
                admitted_at=admitted_at,
                finished_at=self._now(),
            )
            if all(t.reward is None for t in trajectories):
                self._fail(group, "no verdict", trajectories[0].excluded)
            elif not compared(done, settings.algorithm.truncated):
                self._fail(group, "truncated", f"no answer ended within {settings.rollout.max_new_tokens} tokens")
            else:
                self._finish(done)

    def _finish(self, group: Group) -> None:
        """Running → ready; or dropped, if dynamic sampling replaces it.

        Raises:
            RunError: there is no end of groups to be replaced.
        """
        if group.id not in self._running:
            return  # dropped as overdue in this very turn of the loop
        self._failures.succeeded(group.prompt.id)
        times = group.admitted_at, group.finished_at
        self._observer.span("group", group.prompt.id, *times, group=group.id, version=group.admitted_version)
        algorithm = self._settings.algorithm
        rewards = compared(group, algorithm.truncated)
        self._reporter.finished(group, has_signal(rewards))
        if algorithm.dynamic_sampling and not self._dynamic_sampling.keep(rewards):
            # Not given back: it would be served again at once. It comes again with the next pass over the data.
            self._drop(group.id, "no signal", again=False)
            return
        self.gate.finish(group.id, group.oldest_version)
        self._journal.write(ready(group))
        self._ready[group.id] = group
        self._answers.close(group.id)
        del self._running[group.id]
        self._signal.notify()

    def _fail(self, group: int, reason: str, detail: str) -> None:
        """Drop a running group that came to nothing; end the run if nothing else happens any more.

        Raises:
            RunError: `max_failures_in_a_row` different prompts failed and none succeeded in between.
        """
        if group not in self._running:
            return  # dropped as overdue in this very turn of the loop
        prompt = self._prompts[group]
        self._observer.note(f"group {group} ({prompt.id}) dropped: {reason}: {detail}")
        again = self._failures.failed(prompt.id)
        if (failed := self._failures.in_a_row) >= self._settings.control.max_failures_in_a_row:
            raise RunError(f"the groups of {failed} prompts in a row failed; the last one: {reason}: {detail}")
        self._drop(group, reason, again)

    def _drop(self, group: int, reason: str, again: bool = True) -> None:
        """Out of the run; with `again` its prompt goes back to the source."""
        self.gate.drop(group, reason)
        self._journal.write(Dropped(group=group, reason=reason, again=again))
        prompt = self._prompts.pop(group)
        if again:
            self._source.give_back(prompt)
        self._answers.close(group)
        self._ready.pop(group, None)
        self._running.pop(group, None)
        self._to_run.pop(group, None)
        self._signal.notify()

    # --- train ------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        while self.version < self._settings.steps and not self._stopping:
            waiting_since = self._now()
            self._observer.activity("trainer", "waiting for a batch")
            await self._signal.until(lambda: self._stopping or self._saving.asked or bool(self._choose()))
            if self._saving.asked:
                await self._save()
            elif not self._stopping:
                await self._step(self._choose(), waiting_since)

    async def _save(self) -> None:
        self._saving.begun(self._now())
        if self._checkpoint is not None:
            await self._checkpoint(self.version)

    def _choose(self) -> list[int]:
        """The next batch's groups; empty while it cannot be formed."""
        control = self._settings.control
        if control.overdue == "drop":
            self._drop_overdue()
        return self.gate.next_batch(self.version, wait=control.overdue == "wait") or []

    def _drop_overdue(self) -> None:
        for group in self.gate.overdue(self.version, self._prompts):
            if group in self._running:
                self._running[group].cancel()
            self._drop(group, "overdue")

    async def _step(self, chosen: list[int], waiting_since: float) -> None:
        """Train one batch, publish the version it makes, and report it."""
        started = self._now()
        self._observer.activity("trainer", f"step {self.version + 1}")
        colocated = self._settings.launch.placement == "colocated"
        if colocated:
            await self._pause()  # a run that ends here leaves the groups ready
        batch = Batch(version=self.version, groups=[self._ready.pop(group) for group in chosen])
        self.gate.begin_step(chosen)
        result = await self._train_batch(batch)
        made = self._now()
        trained = bool(result.trained) and not self.cut
        weights = await self._trainer.publish(self._fleet.served_version) if trained else None
        if colocated:
            await self._resume()
        if weights is None:
            return
        published = self._now()
        self._delivery.offer(weights)
        self._observer.span("trainer", "wait for batch", waiting_since, started)
        self._observer.span("trainer", f"step {self.version}", started, made, groups=len(result.trained))
        self._observer.span("trainer", "publish", made, published)
        times = {
            "time/step": published - self._last_step_at,
            "time/wait_for_batch": started - waiting_since,
            "time/publish": published - made,
        }
        self._last_step_at = published
        if self.version == self._settings.steps:
            # The last step is reported once its weights are served and evaluated.
            await self._signal.until(lambda: self._stopping or self._delivery.settled(self.version))
        self._reporter.step(batch, result, times)
        check_finite(result, self._settings)
        if (evaluated := self._delivery.evaluated) is not None and evaluated != self._reported_evaluation:
            self._journal.write(Evaluated(version=evaluated))
            self._reported_evaluation = evaluated
        if self._saving.due(self.version, self._now()):
            await self._save()

    async def _pause(self) -> None:
        """The machine is the trainer's. A delivery under way ends first: answers that it waits for could not end."""
        await self._signal.until(lambda: not self._delivery.busy)
        self._delivery.held = True
        await self._fleet.pause()

    async def _resume(self) -> None:
        """The machine is the workers'."""
        await self._fleet.resume()
        self._delivery.held = False
        self._signal.notify()

    async def _train_batch(self, batch: Batch) -> StepResult:
        """Have the trainer make a step of `batch`, and account for it, whatever happens to the run meanwhile: if it is
        ended by an error elsewhere, the step is cut short, and what it came to still counts."""
        step = asyncio.ensure_future(self._trainer.step(batch))
        try:
            result = await asyncio.shield(step)
        except asyncio.CancelledError:
            if not step.done():
                with contextlib.suppress(TrainerError):  # a trainer that is gone: the step itself says so
                    await self._trainer.interrupt()
            self._account(batch, await step)
            raise
        self._account(batch, result)
        return result

    def _account(self, batch: Batch, result: StepResult) -> None:
        """Trained groups leave the run; the others of the batch are ready again. Where runs are reproducible a step is
        made whole or not at all."""
        trained = set(result.trained)
        if self._waves is not None and 0 < len(trained) < len(batch.groups):
            self.cut, trained = True, set()
        left = {group.id: group for group in batch.groups if group.id not in trained}
        self.gate.put_back(left)
        self._ready.update(left)
        if trained:
            self.version = result.version
            self._journal.write(stepped(batch, result))
            self.gate.end_step(result.trained, result.version)
            for group in result.trained:
                del self._prompts[group]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
