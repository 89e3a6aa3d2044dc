"""A run that is killed at any event and continued: nothing is lost, nothing is trained twice, η stays η."""

import asyncio
import copy
import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from lives import Memory, all_prompts, open_source
from world import World

from fleuve.control.journal import Record
from fleuve.control.past import Past
from fleuve.data.source import RowSource
from fleuve.simulate.clock import run_virtual
from fleuve.types import WeightFile

STEPS, BATCH = 12, 3
SEEDS = st.integers(0, 2**32)


@dataclass
class Life:
    """What a run did before it ended: all that a process which is killed leaves behind."""

    memory: Memory
    trained: list[tuple[int, list[str]]]
    """(version made, prompts), replayed steps included."""
    staleness: list[int]
    world: World


def live(seed: int, memory: Memory, past_records: list[Record], **options: object) -> Life:
    """Continue from records (none: from the beginning) to the end."""
    options.setdefault("train_seconds", 0.05)

    async def main() -> Life:
        source = open_source(seed)
        past = Past(source)
        batches = [batch for record in past_records if (batch := past.apply(copy.deepcopy(record))) is not None]
        first = past.version - len(batches)

        async def checkpoint(version: int) -> None:
            memory.checkpoints.append((len(memory.records), copy.deepcopy(world.controller.snapshot())))
            await asyncio.sleep(0.03)

        world = World(
            seed, steps=STEPS, batch_size=BATCH, source=source, past=past, journal=memory, checkpoint=checkpoint,
            **options
        )  # fmt: skip
        world.trainer.version = first
        for batch in batches:
            await world.trainer.step(batch)
        if past.version:
            await world.fleet.update(WeightFile(version=past.version, path="", bytes=0, checksum=""), "recompute")
        await world.controller.run()
        trained = [(b.version + 1, [g.prompt.id for g in b.groups]) for b in world.trainer.batches]
        return Life(memory, trained, world.staleness(), world)

    return run_virtual(main())


def before(life: Life, version: int) -> list[str]:
    """What the run had trained up to `version`."""
    return [prompt for made, prompts in life.trained if made <= version for prompt in prompts]


@given(SEEDS, st.integers(0, 4), st.sampled_from(["wait", "mask", "train"]), st.data())
@settings(max_examples=20)
def test_killed_at_any_record_and_continued_each_prompt_is_trained_once_as_in_a_run_never_killed(
    seed, eta, overdue, data
):
    options = {"eta": eta, "overdue": overdue, "checkpoint_every": data.draw(st.sampled_from([0, 1, 4]))}
    first = live(seed, Memory(), [], **options)
    memory = first.memory
    cut = data.draw(st.integers(0, len(memory.records)))
    position, snapshot = max(
        ((at, s) for at, s in memory.checkpoints if at <= cut), key=lambda c: c[0], default=(0, [])
    )
    second = live(seed, Memory(), [*snapshot, *memory.records[position:cut]], **options)
    kept = snapshot[0].version if snapshot else 0
    trained = before(first, kept) + [p for _, prompts in second.trained for p in prompts]
    assert Counter(trained) == all_prompts(STEPS * BATCH, seed)
    gate = second.world.controller.gate
    assert (gate.admitted, gate.trained, gate.free) == (STEPS * BATCH, STEPS * BATCH, gate.slots)
    if overdue == "wait":
        assert max(second.staleness) <= eta


@given(SEEDS, st.integers(1, 3), st.lists(st.floats(0, 1), min_size=2, max_size=4))
@settings(max_examples=8)
def test_killed_again_and_again_nothing_is_lost_and_nothing_twice(seed, eta, cuts):
    records: list[Record] = []
    for share in cuts:
        memory = Memory()
        live(seed, memory, records, eta=eta)
        records = [*records, *memory.records[: int(share * len(memory.records))]]
    last = live(seed, Memory(), records, eta=eta)
    assert Counter(p for _, prompts in last.trained for p in prompts) == all_prompts(STEPS * BATCH, seed)
    assert [made for made, _ in last.trained] == list(range(1, STEPS + 1))
    assert max(last.staleness) <= eta


@given(SEEDS, st.floats(0, 1))
@settings(max_examples=8)
def test_finished_answers_are_not_sampled_again(seed, share):
    first = live(seed, Memory(), [], eta=2)
    records = first.memory.records[: int(share * len(first.memory.records))]
    past = Past()
    for record in records:
        past.apply(record)
    second = live(seed, Memory(), records, eta=2)
    again = {r.group for r in second.memory.records if type(r).__name__ == "Ready"}
    assert not again & set(past.ready)
    kept = {g.id: [t.versions.tolist() for t in g.trajectories] for g in past.ready.values()}
    for batch in second.world.trainer.batches:
        for group in batch.groups:
            if group.id in kept:
                assert [t.versions.tolist() for t in group.trajectories] == kept[group.id]


@given(SEEDS, st.floats(0, 1), st.booleans())
@settings(max_examples=8)
def test_dropped_groups_are_counted_and_their_prompts_come_back_across_a_kill(seed, share, dynamic):
    options = {
        "eta": 1,
        "overdue": "drop",
        "verdict": lambda p: None if random.Random(p.id).random() < 0.2 else 1.0,
        "group_timeout": 1.5,
    }
    first = live(seed, Memory(), [], **options)
    cut = int(share * len(first.memory.records))
    records = first.memory.records[:cut]
    second = live(seed, Memory(), records, **options)
    gate = second.world.controller.gate
    assert gate.admitted == gate.trained + gate.dropped.total() + len(second.world.controller.pending())
    trained = Counter(p for _, prompts in second.trained for p in prompts)
    assert max(trained.values()) == 1
    past = Past()
    for record in records:
        past.apply(record)
    assert gate.dropped >= past.dropped


def test_the_version_and_its_counters_come_back_together():
    """Capacity after a resumption is what the version and η allow, and no more."""
    first = live(5, Memory(), [], eta=1)
    for cut in range(0, len(first.memory.records), 7):
        source = open_source(5)
        past = Past(source)
        for record in first.memory.records[:cut]:
            past.apply(copy.deepcopy(record))

        async def main(past: Past = past, source: RowSource = source) -> World:
            return World(5, steps=STEPS, batch_size=BATCH, eta=1, source=source, past=past)

        gate = run_virtual(main()).controller.gate
        assert gate.served_version == past.version
        assert gate.admitted - gate.dropped.total() <= (past.version + 2) * BATCH
        assert gate.free == gate.slots - len(past.running) - len(past.ready)
