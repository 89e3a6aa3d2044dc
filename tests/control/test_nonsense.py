"""A worker that hands in what no model of the run can have sampled: found out at the controller's door, named, given
up, and never trained."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import World, heavy_tail

from fleuve.contracts import RolloutError
from fleuve.control.fleet import Fleet
from fleuve.control.replies import fault_of
from fleuve.simulate.clock import run_virtual
from fleuve.types import Completion, GenerationRequest, SamplingParams

VOCABULARY = 50
REQUEST = GenerationRequest(request_id="5/0", input_ids=[1, 2], sampling=SamplingParams(max_new_tokens=4))


def answer(**changes: object) -> Completion:
    """A good one, or one with something wrong in it."""
    good = Completion(
        request_id="5/0", output_ids=[0, 7, 49], logprobs=[-1.0, 0.0, -3.5], versions=[2, 3, 3], finish_reason="stop"
    )
    return msgspec.structs.replace(good, **changes)


def fault(**changes: object) -> str:
    return fault_of(answer(**changes), REQUEST, 2, 3, VOCABULARY)


NONSENSE = {
    "an id beyond the vocabulary": ({"output_ids": [0, 50, 3]}, "there is no token 50: the model has 50"),
    "a negative id": ({"output_ids": [0, -1, 3]}, "no token -1"),
    "an id beyond int32": ({"output_ids": [0, 2**40, 3]}, "no token"),
    "too few log-probabilities": ({"logprobs": [-1.0]}, "3 tokens came with 1 log-probabilities and 3 versions"),
    "too many versions": ({"versions": [2, 2, 2, 2]}, "3 tokens came with 3 log-probabilities and 4 versions"),
    "NaN": ({"logprobs": [-1.0, math.nan, -1.0]}, "nan is no log-probability"),
    "an infinity": ({"logprobs": [-1.0, -math.inf, -1.0]}, "-inf is no log-probability"),
    "both infinities": ({"logprobs": [math.inf, -math.inf, -1.0]}, "inf is no log-probability"),
    "a probability above 1": ({"logprobs": [-1.0, 0.5, -1.0]}, "0.5 is no log-probability"),
    "a version that was never served": ({"versions": [2, 3, 4]}, "version 4 came, where only 2 to 3 were served"),
    "a version that is served no more": ({"versions": [1, 3, 3]}, "version 1 came"),
    "a version below 0": ({"versions": [-1, 3, 3]}, "version -1 came"),
    "nothing": ({"output_ids": [], "logprobs": [], "versions": []}, "the answer is empty"),
    "more than was asked for": ({"output_ids": [1] * 5, "logprobs": [-1.0] * 5, "versions": [2] * 5}, "at most"),
}


@pytest.mark.parametrize(("changes", "words"), NONSENSE.values(), ids=list(NONSENSE))
def test_what_cannot_have_been_sampled_is_found_and_said(changes: dict[str, object], words: str) -> None:
    assert fault() == ""
    assert words in fault(**changes)


def test_an_aborted_answer_may_be_empty() -> None:
    assert fault(output_ids=[], logprobs=[], versions=[], finish_reason="abort") == ""


def test_without_a_known_vocabulary_ids_still_fit_an_array() -> None:
    assert fault_of(answer(output_ids=[0, 10**6, 3]), REQUEST, 2, 3) == ""
    assert "no token" in fault_of(answer(output_ids=[0, 2**31, 3]), REQUEST, 2, 3)


@given(st.integers(0, 3), st.integers(1, 6))
def test_an_answer_and_what_had_begun_of_it_are_no_longer_than_was_asked_for(begun: int, more: int) -> None:
    request = msgspec.structs.replace(REQUEST, output_ids=[1] * begun)
    completion = answer(output_ids=[1] * more, logprobs=[-1.0] * more, versions=[2] * more)
    assert ("at most" in fault_of(completion, request, 2, 3)) == (begun + more > 4)


@given(
    st.lists(st.tuples(st.integers(0, 49), st.floats(-100, 0), st.integers(2, 3)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.sampled_from([(0, 50), (0, -3), (1, math.nan), (1, -math.inf), (1, 1.0), (2, 9), (2, 1)]),
)
def test_one_wrong_number_anywhere_is_enough(tokens, place: int, wrong: tuple[int, float]) -> None:
    columns = [list(column) for column in zip(*tokens, strict=True)]
    names = ("output_ids", "logprobs", "versions")
    assert fault(**dict(zip(names, columns, strict=True))) == ""
    columns[wrong[0]][place % len(tokens)] = wrong[1]
    assert fault(**dict(zip(names, columns, strict=True))) != ""


class Liar:
    """An engine whose answers were another model's."""

    def __init__(self, change: Callable[[Completion], Completion]) -> None:
        self.change = change

    async def health(self) -> int:
        return 0

    async def generate(self, request: GenerationRequest) -> Completion:
        return self.change(answer(request_id=request.request_id, versions=[0, 0, 0]))


@pytest.mark.parametrize(
    "changes", [{"output_ids": [0, 99, 3]}, {"logprobs": [math.nan] * 3}, {"versions": [0, 1, 1]}, {"versions": []}]
)
async def test_the_worker_is_named_and_given_up_and_another_takes_the_request(changes: dict[str, object]) -> None:
    liar = Liar(lambda c: msgspec.structs.replace(c, **changes))
    honest = Liar(lambda c: c)
    fleet = Fleet([liar, honest], seed=0, vocabulary=VOCABULARY)  # type: ignore[list-item]
    for group in range(4):
        async with fleet.worker(1) as lease:
            request = msgspec.structs.replace(REQUEST, request_id=f"{group}/0")
            found = await lease.generate(request)
            assert (found.request_id, found.output_ids) == (f"{group}/0", [0, 7, 49])
    worker = fleet.workers["worker-0"]
    assert worker.life is None
    assert "its answer to" in worker.why
    assert fleet.workers["worker-1"].life is not None


async def test_where_every_worker_lies_the_group_fails_with_the_last_one_s_name() -> None:
    liar = Liar(lambda c: msgspec.structs.replace(c, output_ids=[0, 99, 3]))
    fleet = Fleet([liar] * 3, seed=0, vocabulary=VOCABULARY)  # type: ignore[list-item]
    with pytest.raises(RolloutError, match=r"worker-\d: 5/0\S*: there is no token 99: the model has 50"):
        async with asyncio.timeout(5), fleet.worker(1) as lease:
            await lease.generate(REQUEST)


def test_in_a_run_nothing_of_a_lying_worker_is_trained_and_the_ledger_balances() -> None:
    async def main() -> World:
        world = World(seed=3, steps=12, workers=3, eta=2, length=heavy_tail)
        lie, answers = world.engines[1].generate, itertools.count(1)

        async def generate(request: GenerationRequest) -> Completion:
            completion = await lie(request)
            if next(answers) % 5 == 0:
                completion.versions[-1] += 100
            return completion

        world.engines[1].generate = generate  # type: ignore[method-assign]
        await world.controller.run()
        return world

    world = run_virtual(main())
    gate = world.controller.gate
    assert gate.trained == 12 * 4
    assert max(v for batch in world.trainer.batches for t in batch.trajectories for v in t.versions) < 12
    assert world.fleet.workers["worker-1"].life is None
    assert "version 1" in world.fleet.workers["worker-1"].why
