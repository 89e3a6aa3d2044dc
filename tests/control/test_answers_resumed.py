"""A run that is killed and continued goes on with the answers of the groups that were running: whole ones are taken as
they are, begun ones go on behind their tokens, none is sampled or scored twice, and η stays η."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lives import Memory, all_prompts, open_source
from mortal import Hospital, fleet_of, token
from world import Notes, World

from fleuve.config.settings import RolloutSettings, Settings
from fleuve.control.answers import Answers
from fleuve.control.journal import Answer, Dropped, Judged, Record, Step
from fleuve.control.past import Past
from fleuve.control.resumption import resumption
from fleuve.rollout.sampling import answer_seed
from fleuve.rollout.workflow import SingleTurn
from fleuve.simulate.clock import run_virtual
from fleuve.types import Group, Prompt, Trajectory, Verdict, WeightFile

STEPS, BATCH, GROUP = 6, 2, 3
SEEDS = st.integers(0, 2**32)
CASES = st.fixed_dictionaries(
    {
        "seed": SEEDS,
        "eta": st.integers(0, 3),
        "overdue": st.sampled_from(["wait", "wait", "mask", "train"]),
        "checkpoint_every": st.sampled_from([0, 1, 2]),
        "interrupt": st.sampled_from(["recompute", "finish"]),
        "continuing": st.booleans(),
    }
)


class Rewarder:
    """Takes a while, so that an answer can be whole and without a verdict."""

    def __init__(self) -> None:
        self.scored: Counter[tuple[str, str]] = Counter()

    async def score(self, prompt: Prompt, text: str) -> Verdict:
        await asyncio.sleep(0.3)
        self.scored[prompt.id, text] += 1
        return Verdict(score=float(len(text) % 2))


@dataclass
class Life:
    """What a run did, from `past` on, before it ended."""

    past: Past
    used: dict[int, Answers]
    memory: Memory
    world: World
    hospital: Hospital
    rewarder: Rewarder
    trained: list[str] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    @property
    def asked(self) -> set[str]:
        """The requests that workers got."""
        return {r for engine in self.hospital.engines for r in engine.requests}


def length(rng: object) -> int:
    return rng.choice((5, 20, 20, 90))


def live(case: dict, records: list[Record], until: float | None = None) -> Life:
    """Go on from records (none: begin), to the end or for `until` seconds."""
    seed = case["seed"]

    async def main() -> Life:
        source, memory = open_source(seed), Memory()
        past = Past(source)
        for record in records:
            past.apply(copy.deepcopy(record))
        start = past.version

        async def checkpoint(version: int) -> None:
            memory.checkpoints.append((len(memory.records), copy.deepcopy(world.controller.snapshot())))

        hospital = Hospital(2, seed, continuing=case["continuing"])
        hospital.length = length
        for engine in hospital.engines:
            engine.token_seconds = 0.05
        rewarder = Rewarder()
        rollout = RolloutSettings(group_size=GROUP, max_new_tokens=200)
        world = World(
            seed, steps=STEPS, batch_size=BATCH, group_size=GROUP, eta=case["eta"], overdue=case["overdue"],
            interrupt=case["interrupt"], source=source, past=past, journal=memory, checkpoint=checkpoint,
            checkpoint_every=case["checkpoint_every"], engines=hospital.engines, fleet=fleet_of(hospital, Notes()),
            train_seconds=0.5, workflow=SingleTurn(rollout, seed, lambda ids: " ".join(map(str, ids)), rewarder),
        )  # fmt: skip
        used = copy.deepcopy(resumption(past, world.settings.control, use_answers=True).answers)
        life = Life(past, used, memory, world, hospital, rewarder)
        world.trainer.version = start
        if start:
            await world.fleet.update(WeightFile(version=start, path="", bytes=0, checksum=""), "recompute")
        run = asyncio.ensure_future(world.controller.run())
        await asyncio.wait([run], timeout=until)
        if run.done():
            run.result()
        else:
            run.cancel()
            await asyncio.wait([run])
        life.trained = [g.prompt.id for b in world.trainer.batches for g in b.groups]
        life.staleness = world.staleness()
        return life

    return run_virtual(main())


def begun_before(records: list[Record], first: Life) -> list[str]:
    """What had been trained by the version at which the records lead on."""
    past = Past()
    for record in records:
        past.apply(record)
    made = [r for r in first.memory.records if isinstance(r, Step)]
    prompts = {g.id: g.prompt.id for b in first.world.trainer.batches for g in b.groups}
    return [prompts[group] for step in made if step.version <= past.version for group in step.groups]


def assert_goes_on(seed: int, life: Life, overdue: str, eta: int) -> None:
    """Nothing that was there was sampled or scored again, all that was trained is what had to come, and within η."""
    whole = {a.request_id: a for answers in life.used.values() for a in answers if a.finish_reason is not None}
    judged = {r.request_id for a in life.used.values() for r in a.records() if isinstance(r, Judged)}
    assert not life.asked & set(whole)
    text = {name: " ".join(map(str, a.output_ids.tolist())) for name, a in whole.items()}
    prompt_of = {name: life.past.running[int(name.split("/")[0])].id for name in whole}
    for name in judged:
        assert life.rewarder.scored[prompt_of[name], text[name]] == 0
    for batch in life.world.trainer.batches:
        for group in batch.groups:
            for sample, trajectory in enumerate(group.trajectories):
                its_seed = answer_seed(seed, group.prompt.id, sample)
                assert trajectory.output_ids.tolist() == [token(its_seed, i) for i in range(len(trajectory.output_ids))]
                assert trajectory.reward == float(len(trajectory.text) % 2)
                if (answer := whole.get(f"{group.id}/{sample}")) is not None:
                    assert trajectory.versions.tolist() == answer.versions.tolist()
    if overdue == "wait":
        assert max(life.staleness, default=0) <= eta


@given(CASES, st.data())
@settings(max_examples=25)
def test_killed_at_any_record_the_answers_of_running_groups_are_taken_as_far_as_they_had_come(case, data):
    first = live(case, [])
    records = first.memory.cut(data.draw(st.integers(0, len(first.memory.records))))
    second = live(case, records)
    assert Counter(begun_before(records, first) + second.trained) == all_prompts(STEPS * BATCH, case["seed"])
    assert_goes_on(case["seed"], second, case["overdue"], case["eta"])


@given(CASES, st.lists(st.floats(0, 1), min_size=2, max_size=4))
@settings(max_examples=10)
def test_killed_again_and_again_each_life_goes_on_with_what_all_before_it_had(case, cuts):
    records: list[Record] = []
    for share in cuts:
        life = live(case, records)
        assert_goes_on(case["seed"], life, case["overdue"], case["eta"])
        records = [*records, *life.memory.records[: int(share * len(life.memory.records))]]
    past = Past()
    batches = [batch for record in records if (batch := past.apply(copy.deepcopy(record))) is not None]
    last = live(case, records)
    before = [group.prompt.id for batch in batches for group in batch.groups]
    assert Counter(before + last.trained) == all_prompts(STEPS * BATCH, case["seed"])
    assert_goes_on(case["seed"], last, case["overdue"], case["eta"])


@given(SEEDS, st.integers(1, 3), st.floats(2, 12))
@settings(max_examples=15)
def test_a_checkpoint_keeps_what_was_known_of_answers_that_had_begun_and_they_go_on_there(seed, eta, seconds):
    case = {"seed": seed, "eta": eta, "overdue": "wait", "checkpoint_every": 0, "interrupt": "recompute",
            "continuing": True}  # fmt: skip
    first = live(case, [], until=seconds)
    second = live(case, first.world.controller.snapshot())
    begun = {a.request_id: len(a.output_ids) for answers in second.used.values() for a in answers
             if a.finish_reason is None}  # fmt: skip
    given = {name: n for e in second.hospital.engines for name, (n, _) in e.given.items() if n}
    assert given == begun
    assert_goes_on(seed, second, "wait", eta)
    trained = Counter(first.trained + second.trained)
    assert trained <= all_prompts(STEPS * BATCH, seed)  # the first's last step may have been cut short
    assert trained.total() == second.world.controller.gate.trained


def test_of_long_answers_a_checkpoint_lacks_a_second_at_most():
    case = {"seed": 3, "eta": 2, "overdue": "wait", "checkpoint_every": 0, "interrupt": "recompute",
            "continuing": True}  # fmt: skip
    first = live(case, [], until=4.2)
    kept = sum(len(r.output_ids) for r in first.world.controller.snapshot() if isinstance(r, Answer))
    sampled = sum(engine.tokens for engine in first.hospital.engines)
    ready = sum(len(t.output_ids) for g in first.world.controller._ready.values() for t in g.trajectories)
    trained = sum(len(t.output_ids) for b in first.world.trainer.batches for t in b.trajectories)
    lost = sampled - kept - ready - trained
    in_flight = sum(engine.active for engine in first.hospital.engines) or BATCH * GROUP * 3
    assert kept > 0
    assert 0 <= lost <= in_flight * 1.3 / 0.05


def test_groups_whose_answers_are_too_old_for_their_deadline_are_sampled_anew():
    past = Past()
    past.version, past.admitted = 4, 3
    for group, version in ((0, 2), (1, 2), (2, 4)):
        past.running[group] = Prompt(id=f"p{group}", input_ids=[1], text="", answer="")
        past.answers[group] = Answers()
        past.answers[group].apply(an_answer(group, version))
    control = settings_of(batch_size=1, max_staleness=2)
    made = resumption(past, control, use_answers=True)
    assert set(made.answers) == {0, 2}  # one step is left for groups of version 2
    assert made.live == {0: 2, 1: 4, 2: 4}
    lenient = settings_of(batch_size=1, max_staleness=2, overdue="train")
    assert set(resumption(past, lenient, use_answers=True).answers) == {0, 1, 2}
    without = resumption(past, control, use_answers=False)
    assert not without.answers
    assert without.live == {0: 4, 1: 4, 2: 4}


def test_under_drop_a_group_that_is_too_late_already_is_dropped_before_the_first_step_and_asked_of_nobody():
    source, memory, asked = open_source(0), Memory(), set()
    past = Past(source)
    past.version, past.admitted = 4, 5
    prompts = [source.next() for _ in range(5)]
    for group, version in ((0, 1), (1, 1), (2, 2)):  # to be trained by the steps from 3, 3 and 4
        past.running[group] = prompts[group]
        past.answers[group] = Answers()
        past.answers[group].apply(an_answer(group, version))
    for group in (3, 4):
        past.ready[group] = a_ready_group(group, prompts[group], version=4)

    async def main() -> World:
        world = World(steps=7, batch_size=2, eta=2, overdue="drop", source=source, past=past, journal=memory)
        world.trainer.version = 4
        await world.fleet.update(WeightFile(version=4, path="", bytes=0, checksum=""), "recompute")
        for engine in world.engines:
            engine.fault = lambda request: asked.add(request.request_id) or ""
        await world.controller.run()
        return world

    world = run_virtual(main())
    happened = [record for record in memory.records if isinstance(record, Dropped | Step)]
    assert [(type(record), getattr(record, "group", None)) for record in happened[:3]] == [
        (Dropped, 0), (Dropped, 1), (Step, None)
    ]  # fmt: skip
    assert "2/0" in asked
    assert not asked & {"0/0", "1/0"}
    assert world.trained() >= Counter(prompt.id for prompt in prompts), "also those that came again"
    assert world.controller.gate.dropped == {"overdue": 2}


def test_answers_by_weights_that_the_run_has_not_come_to_are_not_used():
    past = Past()
    past.version, past.admitted = 4, 1
    past.running[0] = Prompt(id="p", input_ids=[1], text="", answer="")
    past.answers[0] = Answers()
    past.answers[0].apply(an_answer(0, 5))
    made = resumption(past, settings_of(batch_size=1, max_staleness=2), use_answers=True)
    assert not made.answers
    assert made.live == {0: 4}


def a_ready_group(group: int, prompt: Prompt, version: int) -> Group:
    trajectory = Trajectory(
        prompt_ids=np.zeros(1, np.int32),
        output_ids=np.zeros(3, np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=np.full(3, version, np.int32),
        loss_mask=np.ones(3, np.bool_),
        finish_reason="stop",
        reward=1.0,
    )
    return Group(id=group, prompt=prompt, trajectories=[trajectory], admitted_version=version)


def an_answer(group: int, version: int) -> Answer:
    return Answer(
        group=group,
        request_id=f"{group}/0",
        asked=0,
        output_ids=np.zeros(3, np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=np.full(3, version, np.int32),
        finish_reason="stop",
    )


def settings_of(**control: object):
    tables = {
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "trainer": {"minibatches": 1},
        "control": control,
    }
    return Settings.model_validate({"run_dir": "unused", "steps": 9, **tables}).control
