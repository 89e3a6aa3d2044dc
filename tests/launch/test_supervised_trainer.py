"""A trainer that dies is started again, loads the last checkpoint, makes the steps since once more, and goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fleuve.contracts import TrainerError
from fleuve.control.journal import Admitted, Step, ready
from fleuve.control.past import Past
from fleuve.launch.checkpoints import Checkpoints
from fleuve.launch.history import History
from fleuve.launch.journal import JournalFile
from fleuve.launch.process import ChildProcess
from fleuve.launch.saver import Saver
from fleuve.launch.trainer import LOSSES, SupervisedTrainer
from fleuve.types import Batch, Group, Prompt, StepResult


class Run:
    """A run's trainer, journal and checkpoints, and a controller's bookkeeping in a few lines."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.notes: list[str] = []
        self.past = Past()
        self.journal = JournalFile(tmp / "journal", 0, self.notes.append)
        self.trainer = SupervisedTrainer(
            self.start,
            History(tmp / "checkpoints", tmp / "journal"),
            self.notes.append,
            step_timeout=60.0,
            health_timeout=1.0,
        )
        (tmp / "checkpoints").mkdir()
        self.saver = Saver(Checkpoints(tmp / "checkpoints", 2), self.trainer, self.journal, self.notes.append)
        self.weights: list[float] = []

    async def start(self) -> ChildProcess:
        return await ChildProcess.start(
            "trainer",
            "light_trainer",
            {"log": str(self.tmp / "asked")},
            self.tmp / "trainer.log",
            env={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])},
            start_timeout=60.0,
        )

    @property
    def asked(self) -> list[str]:
        return (self.tmp / "asked").read_text().splitlines()

    def record(self, record: Admitted | Step | object) -> None:
        self.journal.write(record)  # type: ignore[arg-type]
        self.past.apply(record)  # type: ignore[arg-type]

    def batch(self) -> Batch:
        version, groups = self.past.version, []
        for number in range(2):
            prompt = Prompt(id=f"p{version}/{number}", input_ids=[1], text="", answer="")
            group = Group(id=2 * version + number, prompt=prompt, trajectories=[], admitted_version=version)
            self.record(Admitted(group=group.id, prompt=prompt, version=version))
            self.record(ready(group))
            groups.append(group)
        return Batch(version=version, groups=groups)

    async def step(self) -> None:
        batch = self.batch()
        result = await self.trainer.step(batch)
        self.record(Step(version=result.version, groups=[g.id for g in batch.groups], trained=result.trained))
        self.weights.append(result.metrics["weights"])

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.trainer.process is not None
        os.kill(self.trainer.process.pid, number)


@asynccontextmanager
async def a_run(tmp: Path) -> AsyncIterator[Run]:
    run = Run(tmp)
    await run.trainer.open()
    try:
        yield run
    finally:
        await run.trainer.close()


async def play(tmp: Path, steps: int, at: dict[int, Callable[[Run], Awaitable[None]]]) -> Run:
    """`steps` steps; `at[n]` happens after the n-th."""
    os.makedirs(tmp, exist_ok=True)
    async with a_run(tmp) as run:
        for number in range(1, steps + 1):
            await run.step()
            if number in at:
                await at[number](run)
        return run


async def killed(run: Run) -> None:
    run.kill()


async def saved(run: Run) -> None:
    from fleuve.control.gate import Gate
    from fleuve.control.past import snapshot

    gate = Gate(2, 0)
    past = run.past
    gate.resume(past.admitted, past.trained, {}, {})

    class Source:
        def state(self) -> dict[str, object]:
            return {}

    await run.saver.save(past.version, snapshot(gate, past.version, Source(), {}, [], next_record=run.journal.next))  # type: ignore[arg-type]


async def test_a_killed_trainer_makes_its_steps_once_more_and_comes_to_the_same(tmp_path):
    whole = await play(tmp_path / "whole", 4, {})
    broken = await play(tmp_path / "broken", 4, {2: killed})
    assert broken.weights == whole.weights
    assert broken.asked == ["start", "step 1", "step 2", "start", "step 1", "step 2", "step 3", "step 4"]
    assert any("the trainer is lost" in note and "SIGKILL" in note for note in broken.notes)
    assert broken.trainer.restarts == 1


async def test_only_the_steps_since_the_last_checkpoint_are_made_again(tmp_path):
    async def saved_then_step_then_killed(run: Run) -> None:
        await saved(run)
        await run.step()
        run.kill()

    whole = await play(tmp_path / "whole", 4, {})
    broken = await play(tmp_path / "broken", 3, {2: saved_then_step_then_killed})
    assert broken.weights == whole.weights
    assert broken.asked == ["start", "step 1", "step 2", "step 3", "start", "load step-000002", "step 3", "step 4"]


async def test_a_checkpoint_that_was_damaged_since_is_not_what_another_trainer_begins_from(tmp_path):
    async def damaged(run: Run) -> None:
        file = run.tmp / "checkpoints" / "step-000003" / "trainer.safetensors"
        file.write_text(file.read_text().replace("3", "4"))
        run.kill()

    whole = await play(tmp_path / "whole", 5, {})
    broken = await play(tmp_path / "broken", 5, {1: saved, 3: saved, 4: damaged})
    assert broken.weights == whole.weights
    again = ["start", "load step-000001", "step 2", "step 3", "step 4", "step 5"]
    assert broken.asked == ["start", "step 1", "step 2", "step 3", "step 4", *again]


async def test_a_trainer_that_is_stopped_is_killed_and_replaced_within_its_deadline(tmp_path):
    async def stopped(run: Run) -> None:
        run.kill(signal.SIGSTOP)

    run = await play(tmp_path, 2, {1: stopped})
    assert run.asked == ["start", "step 1", "start", "step 1", "step 2"]


async def test_one_that_dies_while_idle_is_replaced_at_once_and_publishes_again_what_it_had(tmp_path):
    async with a_run(tmp_path) as run:
        tending = asyncio.create_task(run.trainer.tend())
        await run.step()
        before = await run.trainer.publish(0)
        run.kill()
        async with asyncio.timeout(30):
            while run.asked.count("publish 1") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        after = await run.trainer.publish(0)
        tending.cancel()
    assert before == after


async def test_a_trainer_that_dies_again_and_again_ends_the_run_with_its_last_words(tmp_path):
    async with a_run(tmp_path) as run:
        await run.step()

        async def dies_at_once() -> ChildProcess:
            child = await run.start()
            os.kill(child.pid, signal.SIGKILL)
            return child

        run.trainer._start = dies_at_once
        run.kill()
        with pytest.raises(TrainerError, match=f"lost {LOSSES} times and made no step in between"):
            await run.trainer.step(run.batch())
        assert not run.trainer.alive


async def test_one_that_dies_while_a_run_is_continued_is_replaced_and_makes_the_steps_from_the_beginning(tmp_path):
    earlier = await play(tmp_path, 3, {})
    (tmp_path / "asked").unlink()
    trainer = SupervisedTrainer(
        earlier.start,
        History(tmp_path / "checkpoints", tmp_path / "journal"),
        earlier.notes.append,
        step_timeout=60.0,
        health_timeout=1.0,
    )
    made: list[tuple[int, float]] = []

    def tell(batch: Batch, result: StepResult) -> None:
        made.append((result.version, result.metrics["weights"]))
        if len(made) == 2:
            assert trainer.process is not None
            os.kill(trainer.process.pid, signal.SIGKILL)

    await trainer.open()
    try:
        reading = History(tmp_path / "checkpoints", tmp_path / "journal").open()
        await trainer.bring_up(reading, tell)
    finally:
        await trainer.close()
    assert (trainer.version, trainer.restarts, reading.past.version) == (3, 1, 3)
    assert [version for version, _ in made] == [1, 2, 1, 2, 3]
    assert [weights for _, weights in made[2:]] == earlier.weights
    assert earlier.asked == ["start", "step 1", "step 2", "start", "step 1", "step 2", "step 3"]


async def test_where_the_journal_has_a_gap_the_run_ends_and_says_how_far_it_leads(tmp_path):
    async with a_run(tmp_path) as run:
        await run.step()
        for segment in (tmp_path / "journal").iterdir():
            segment.unlink()
        run.kill()
        with pytest.raises(TrainerError, match="lost at version 1, and the journal leads to version 0 only"):
            await run.trainer.step(run.batch())


async def test_an_interruption_while_the_trainer_is_brought_back_trains_nothing(tmp_path):
    async with a_run(tmp_path) as run:
        await run.step()
        run.kill()
        step = asyncio.create_task(run.trainer.step(run.batch()))
        async with asyncio.timeout(30):
            while not run.notes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await run.trainer.interrupt()
        assert (await step).trained == []
