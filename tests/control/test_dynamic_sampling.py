"""Dynamic sampling: groups whose answers tie are replaced within the gate's law, and never for ever without a word."""

import asyncio
import copy
import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lives import Memory
from world import Engine, World

from fleuve.contracts import RunError
from fleuve.control.dynamic_sampling import DynamicSampling, compared, has_signal
from fleuve.control.gate import State
from fleuve.control.journal import Record
from fleuve.control.past import Past
from fleuve.data.rows import Row
from fleuve.data.source import FilePasses, RowSource
from fleuve.simulate.clock import run_virtual
from fleuve.types import Group, Prompt, Trajectory

ON = {"dynamic_sampling": True}


class Scores:
    """A verifier under which the answers to some prompts all score `tie`, and those to the others 0, 1, 0, 1, …"""

    def __init__(self, tied, tie: float = 0.0) -> None:
        self.tied, self.tie = tied, tie
        self.calls: Counter[str] = Counter()

    def __call__(self, prompt: Prompt) -> float:
        self.calls[prompt.id] += 1
        return self.tie if self.tied(prompt.id) else float(self.calls[prompt.id] % 2)


def tied_at(rate: float, seed: int = 0):
    return lambda id: random.Random(f"{seed}/{id}").random() < rate


def play(**options: object) -> tuple[World, BaseException | None, float]:
    """A world at its end, what ended it, and how many virtual seconds that took."""

    async def main() -> tuple[World, BaseException | None, float]:
        world = World(**{"group_size": 2, "algorithm": ON, **options})
        error = None
        try:
            await world.controller.run()
        except BaseExceptionGroup as caught:
            error = caught.exceptions[0]
        return world, error, asyncio.get_running_loop().time()

    return run_virtual(main())


def assert_conserved(world: World) -> None:
    gate = world.controller.gate
    assert gate.admitted == sum(gate.count(s) for s in State) + gate.trained + gate.dropped.total()
    assert gate.trained == sum(len(b.groups) for b in world.trainer.batches)


def assert_only_signal_was_trained(world: World) -> None:
    for batch in world.trainer.batches:
        for group in batch.groups:
            assert len({t.reward for t in group.trajectories}) > 1


# --- the decision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards", [[], [1.0], [0.0, 0.0], [0.3] * 8, [0.0, -0.0]])
def test_a_group_has_no_signal_where_there_are_not_two_different_rewards(rewards):
    assert not has_signal(rewards)


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.5, 0.5, 0.5, 0.50001], [-1.0, 1.0]])
def test_two_different_rewards_are_a_signal(rewards):
    assert has_signal(rewards)


def answer(reward: float | None, finish_reason: str = "stop") -> Trajectory:
    nothing = np.zeros(0, np.int32)
    return Trajectory(
        prompt_ids=nothing,
        output_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        versions=nothing,
        loss_mask=np.zeros(0, np.bool_),
        finish_reason=finish_reason,
        reward=reward,
    )


def test_answers_without_verdict_are_not_compared_nor_truncated_ones_where_those_are_excluded():
    answers = [answer(1.0), answer(None), answer(0.0, "length"), answer(1.0)]
    group = Group(
        id=0, prompt=Prompt(id="p", input_ids=[1], text="", answer=""), trajectories=answers, admitted_version=0
    )
    assert compared(group, "keep") == [1.0, 0.0, 1.0]
    assert compared(group, "exclude") == [1.0, 1.0]


def test_the_end_comes_after_ten_batches_in_a_row_without_signal_and_not_before():
    sampling = DynamicSampling(batch_size=8)
    for _ in range(79):
        assert not sampling.keep([1.0, 1.0])
    assert sampling.keep([1.0, 0.0])
    for _ in range(79):
        assert not sampling.keep([1.0, 1.0])
    with pytest.raises(RunError, match="80 groups in a row had no signal"):
        sampling.keep([1.0, 1.0])


def test_groups_without_signal_before_a_kill_count_after_it():
    sampling = DynamicSampling(batch_size=8, without_signal=78)
    assert not sampling.keep([1.0, 1.0])
    with pytest.raises(RunError, match=r"80 groups in a row had no signal.*\(of the last 2: every answer scored 1\)"):
        sampling.keep([1.0, 1.0])
    sampling = DynamicSampling(batch_size=8, without_signal=78)
    assert sampling.keep([0.0, 1.0])
    assert sampling.without_signal == 0


async def one_second_of_a_run_without_signal(
    memory: Memory, records: list[Record], seen: int
) -> tuple[World, BaseException | None]:
    """It goes on from `records`, which hold `seen` groups without signal."""
    past = Past()
    for record in records:
        past.apply(copy.deepcopy(record))
    assert past.without_signal == seen
    world = World(algorithm=ON, group_size=2, verdict=lambda _: 1.0, journal=memory, past=past, eta=1)
    for _ in range(past.admitted):  # where its source stands
        world.source.next()
    try:
        async with asyncio.timeout(1.0):
            await world.controller.run()
    except BaseExceptionGroup as caught:
        return world, caught.exceptions[0]
    except TimeoutError:
        pass
    return world, None


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_a_run_that_is_killed_again_and_again_sees_all_the_same_that_no_group_has_signal(checkpoint_every):
    """Nothing has signal from some point on: however often it is continued, it ends after `limit` groups."""
    records: list[Record] = []
    seen = lives = 0
    error = None
    while error is None:
        memory = Memory()
        world, error = run_virtual(one_second_of_a_run_without_signal(memory, records, seen))
        if checkpoint_every:
            memory.checkpoints.append((memory.next, world.controller.snapshot()))
        records = memory.cut(memory.next) if checkpoint_every else [*records, *memory.records]
        seen = world.controller.gate.dropped["no signal"]
        lives += 1
    assert isinstance(error, RunError)
    assert world.controller.gate.dropped["no signal"] == DynamicSampling(batch_size=4).limit - 1
    assert lives > 2


def test_small_batches_do_not_end_a_run_by_chance():
    assert DynamicSampling(batch_size=1).limit == 64


@pytest.mark.parametrize(
    ("groups", "seen"),
    [
        ([[0.0, 0.0]], "one reward (every answer scored 0),"),
        ([[1.0, 1.0], [1.0, 1.0]], "(every answer scored 1),"),
        ([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], "(mean 0.25, from 0 to 1),"),
        ([[1.0]], "(every answer scored 1; 64 of them had fewer than two answers to compare),"),
        ([[]], "(none; 64 of them had fewer than two answers to compare),"),
    ],
)
def test_the_last_word_is_one_line_that_says_what_was_seen_and_what_to_do(groups, seen):
    sampling = DynamicSampling(batch_size=len(groups))
    *before, last = groups * (sampling.limit // len(groups))
    assert not any(sampling.keep(rewards) for rewards in before)
    with pytest.raises(RunError) as caught:
        sampling.keep(last)
    message = str(caught.value)
    assert seen in message
    assert "\n" not in message
    for remedy in ("easier problems", "harder ones", "rollout.group_size", "algorithm.dynamic_sampling = false"):
        assert remedy in message


# --- in the run -----------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    rate=st.floats(0.0, 0.5),
    eta=st.integers(0, 4),
    batch_size=st.integers(2, 5),
    overdue=st.sampled_from(["wait", "mask", "train", "drop"]),
    placement=st.sampled_from(["disaggregated", "colocated"]),
    train_seconds=st.floats(0.001, 1.0),
    tail=st.integers(10, 200),
)
@settings(max_examples=80)
def test_every_trained_group_has_signal_and_every_other_promise_holds(
    seed, rate, eta, batch_size, overdue, placement, train_seconds, tail
):
    scores = Scores(tied_at(rate, seed))
    world, error, _ = play(
        seed=seed,
        eta=eta,
        steps=12,
        batch_size=batch_size,
        overdue=overdue,
        placement=placement,
        train_seconds=train_seconds,
        length=lambda rng: tail if rng.random() < 0.05 else 10,
        verdict=scores,
    )
    controller = world.controller
    assert error is None
    assert controller.version == 12
    assert controller.gate.trained == 12 * batch_size
    assert controller.pending() == []
    assert_conserved(world)
    assert_only_signal_was_trained(world)
    assert max(world.trained().values()) == 1
    if overdue in ("wait", "drop"):
        assert max(world.staleness()) <= eta
    # Only what was overdue is served again; what has no signal is not.
    again = world.source.issued.total() - len(world.source.issued)
    assert again + len(world.source.returned) == controller.gate.dropped["overdue"]
    assert sum(map(scores.tied, world.source.issued)) >= controller.gate.dropped["no signal"]


@pytest.mark.parametrize("overdue", ["wait", "mask", "train", "drop"])
@pytest.mark.parametrize("eta", [0, 3])
def test_where_four_groups_of_five_tie_the_run_still_completes_every_batch_full(eta, overdue):
    world, error, _ = play(eta=eta, overdue=overdue, batch_size=8, steps=10, verdict=Scores(tied_at(0.8)))
    assert error is None
    assert [len(b.groups) for b in world.trainer.batches] == [8] * 10
    assert_only_signal_was_trained(world)
    assert_conserved(world)
    assert world.controller.gate.dropped["no signal"] > 160


def test_without_dynamic_sampling_ties_are_trained():
    world, error, _ = play(algorithm={}, verdict=Scores(lambda _: True))
    assert error is None
    assert world.controller.gate.dropped == Counter()


@pytest.mark.parametrize("eta", [0, 1, 16])
@pytest.mark.parametrize("tie", [0.0, 1.0])
def test_where_every_group_ties_the_run_ends_soon_and_says_what_it_saw(eta, tie):
    world, error, seconds = play(eta=eta, verdict=Scores(lambda _: True, tie))
    gate = world.controller.gate
    assert isinstance(error, RunError)
    assert (
        f"64 groups in a row had no signal: all answers to a prompt had one reward (every answer scored {tie:g})"
        in str(error)
    )
    assert world.trainer.batches == []
    assert gate.dropped == Counter({"no signal": 63})
    assert gate.admitted <= 64 + gate.slots
    assert seconds < 60.0
    assert_conserved(world)


def test_groups_of_one_answer_have_nothing_to_compare_and_the_end_says_so():
    _, error, _ = play(group_size=1, verdict=lambda _: 1.0)
    assert isinstance(error, RunError)
    assert "64 of them had fewer than two answers to compare" in str(error)


def test_a_tie_is_no_failure():
    """Every second group fails; the ties between them show that the machinery works."""

    def verdict(prompt: Prompt) -> float | None:
        return None if int(prompt.id[1:]) % 2 else 0.0

    world, error, _ = play(verdict=verdict, eta=4)
    assert isinstance(error, RunError)
    assert "had no signal" in str(error)
    assert world.controller.gate.dropped["no verdict"] > 16


def test_groups_that_tie_and_groups_that_fail_together_lose_and_repeat_nothing():
    async def main() -> World:
        world = World(seed=5, group_size=2, algorithm=ON, eta=1, steps=40, verdict=Scores(tied_at(0.4)))
        for engine in world.engines:
            engine.fault = lambda _, rng=engine.rng: "raise" if rng.random() < 0.1 else ""
        await world.controller.run()
        return world

    world = run_virtual(main())
    dropped = world.controller.gate.dropped
    assert dropped["no signal"] > 20
    assert dropped["rollout failed"] > 20
    assert world.controller.version == 40
    assert max(world.staleness()) <= 1
    assert max(world.trained().values()) == 1
    assert_only_signal_was_trained(world)
    assert_conserved(world)


def test_a_prompt_without_signal_comes_again_with_the_next_pass_over_the_data_and_not_before():
    rows = [Row(f"row {i}", {}) for i in range(12)]
    source = RowSource(
        FilePasses(rows, digest="", seed=0, shuffle=True),
        lambda id, row: Prompt(id=id, input_ids=[1, 2], text="", answer=""),
    )
    scores = Scores(lambda id: id.split("/")[1] in ("3", "7", "8"))
    world, error, _ = play(source=source, verdict=scores, batch_size=3, steps=12)
    assert error is None
    assert set(scores.calls.values()) == {2}  # each prompt was sampled once, by a group of two
    for number in range(3):
        assert {f"e{number}/{i}" for i in range(12)} <= set(scores.calls)
    assert_only_signal_was_trained(world)


def test_a_stopped_run_keeps_what_is_in_flight_and_not_what_had_no_signal():
    scores = Scores(tied_at(0.3))

    async def main() -> World:
        world = World(group_size=2, algorithm=ON, eta=3, steps=1000, verdict=scores)
        asyncio.get_running_loop().call_later(4.321, world.controller.stop)
        await world.controller.run()
        return world

    world = run_virtual(main())
    pending = {p.id for p in world.controller.pending()}
    replaced = set(world.source.issued) - set(world.trained()) - pending
    assert len(replaced) == world.controller.gate.dropped["no signal"] > 3
    assert all(map(scores.tied, replaced))
    assert world.controller.snapshot()[0].dropped == {"no signal": len(replaced)}


def test_the_reward_of_all_that_finished_is_reported_beside_that_of_what_was_trained():
    """Kept groups score 0.5, replaced ones 0. With η = 0 what finished is the batch and what was replaced for it."""
    world, _, _ = play(eta=0, batch_size=4, verdict=Scores(tied_at(0.5)))
    before = 0.0
    for row in world.observer.steps:
        replaced = row.get("groups/dropped/no_signal", 0.0) - before
        before += replaced
        assert row["rollout/reward_mean"] == pytest.approx(4 * 0.5 / (4 + replaced))
        assert row["rollout/no_signal_fraction"] == pytest.approx(replaced / (4 + replaced))
    assert before == world.controller.gate.dropped["no signal"] > 10


# --- what is no number ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("algorithm", [{}, ON])
def test_a_reward_that_is_no_number_is_excluded_with_a_reason_and_shifts_nobody(bad, algorithm):
    calls: Counter[str] = Counter()

    def verdict(prompt: Prompt) -> float:
        calls[prompt.id] += 1
        return [bad, 0.0, 1.0][calls[prompt.id] % 3]

    world, error, _ = play(group_size=3, algorithm=algorithm, verdict=verdict, steps=5)
    assert error is None
    for batch in world.trainer.batches:
        for group in batch.groups:
            assert sorted(t.reward for t in group.trajectories if t.reward is not None) == [0.0, 1.0]
            assert [t.excluded for t in group.trajectories if t.reward is None] == [f"its reward is {bad}"]
    assert all(row["rollout/reward_mean"] == 0.5 for row in world.observer.steps if "rollout/reward_mean" in row)
    assert all(row["rollout/excluded"] == 4 for row in world.observer.steps)


def test_a_group_without_any_number_among_its_rewards_has_no_verdict():
    _, error, _ = play(algorithm={}, verdict=lambda _: float("nan"))
    assert isinstance(error, RunError)
    assert "the last one: no verdict: its reward is nan" in str(error)


@pytest.mark.parametrize("dynamic", [True, False])
def test_where_no_answer_ends_in_time_and_those_are_excluded_the_run_ends_and_says_so(dynamic, monkeypatch):
    """Not as a success that learnt nothing, nor with advice about the difficulty of the problems."""
    generate = Engine.generate

    async def cut_off(self, request):
        return msgspec.structs.replace(await generate(self, request), finish_reason="length")

    monkeypatch.setattr(Engine, "generate", cut_off)
    world, error, _ = play(algorithm={"dynamic_sampling": dynamic, "truncated": "exclude"}, verdict=lambda _: 1.0)
    assert isinstance(error, RunError)
    assert "truncated: no answer ended within" in str(error)
    assert world.trainer.batches == []
    assert_conserved(world)
    kept, error, _ = play(algorithm={"truncated": "keep"}, verdict=lambda _: 1.0)
    assert error is None
    assert len(kept.trainer.batches) == kept.controller.version
