"""Every answer is the one that was asked for, or the group fails by name."""

import asyncio

import pytest

from fleuve.config.settings import RolloutSettings
from fleuve.contracts import RolloutError
from fleuve.control.fleet import Fleet
from fleuve.rollout.workflow import SingleTurn
from fleuve.types import Completion, GenerationRequest, Prompt, Verdict

PROMPT = Prompt(id="e0/0", input_ids=[1, 2], text="", answer="")


class Engine:
    """Answers each request with its number; or all of them with the reply to the first."""

    def __init__(self, mixes_up: bool = False, version: int = 7) -> None:
        self.mixes_up = mixes_up
        self.version = version
        self.asked: list[str] = []

    async def health(self) -> int:
        return self.version

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked.append(request.request_id)
        await asyncio.sleep(0.01)  # so that two groups overlap
        id = self.asked[0] if self.mixes_up else request.request_id
        sample = int(id.partition("~")[0].split("/")[1])
        return Completion(
            request_id=id,
            output_ids=[sample] * 3,
            logprobs=[-1.0] * 3,
            versions=[self.version] * 3,
            finish_reason="stop",
        )


class Rewarder:
    async def score(self, prompt: Prompt, text: str) -> Verdict:
        return Verdict(score=float(text))


async def answers(*engines: Engine):
    workflow = SingleTurn(RolloutSettings(group_size=3), 0, lambda ids: str(ids[0]), Rewarder())
    async with Fleet(engines, seed=0, version=7).worker(3) as worker:
        return await workflow.run(worker, PROMPT, 5)


async def test_every_answer_is_scored_by_its_own_text():
    assert [(a.text, a.reward) for a in await answers(Engine())] == [("0", 0.0), ("1", 1.0), ("2", 2.0)]


async def test_the_reply_to_another_request_is_an_error_that_names_both():
    with pytest.raises(RolloutError, match=r"worker-0: 5/[12] was answered by the reply to 5/0"):
        await answers(Engine(mixes_up=True))


@pytest.mark.parametrize("seed", range(4))
async def test_a_worker_that_somebody_else_restarted_gives_no_answers_of_old_weights(seed):
    """It answers, but with the weights that the run began with; the answers are taken from the other."""
    reborn, other = Engine(version=3), Engine(version=7)
    fleet = Fleet([reborn, other], seed=seed, version=7)
    workflow = SingleTurn(RolloutSettings(group_size=3), 0, lambda ids: str(ids[0]), Rewarder())
    async with fleet.worker(3) as first, fleet.worker(3) as second:  # one on each
        groups = await asyncio.gather(workflow.run(first, PROMPT, 5), workflow.run(second, PROMPT, 6))
    assert {v for group in groups for answer in group for v in answer.versions.tolist()} == {7}
    assert [life.engine for life in fleet.lives()] == [other]
