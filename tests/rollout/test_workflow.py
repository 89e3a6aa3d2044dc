"""One prompt's episode: every answer is the one that was asked for, or the group fails by name."""

import pytest

from fleuve.config.settings import RolloutSettings
from fleuve.contracts import RolloutError
from fleuve.rollout.workflow import SingleTurn
from fleuve.types import Completion, GenerationRequest, Prompt, Verdict

PROMPT = Prompt(id="e0/0", input_ids=[1, 2], text="", answer="")


class Engine:
    """Answers each request with its number; from the second one on, perhaps with the reply to another."""

    def __init__(self, mixes_up: bool = False) -> None:
        self.mixes_up = mixes_up
        self.asked: list[str] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked.append(request.request_id)
        id = self.asked[0] if self.mixes_up else request.request_id
        sample = int(id.split("/")[1])
        return Completion(
            request_id=id, output_ids=[sample] * 3, logprobs=[-1.0] * 3, versions=[7] * 3, finish_reason="stop"
        )


class Rewarder:
    async def score(self, prompt: Prompt, text: str) -> Verdict:
        return Verdict(score=float(text))


def workflow() -> SingleTurn:
    return SingleTurn(RolloutSettings(group_size=3), 0, lambda ids: str(ids[0]), Rewarder())


async def test_every_answer_is_scored_by_its_own_text():
    answers = await workflow().run(Engine(), PROMPT, 5)
    assert [(a.text, a.reward, a.versions.tolist()) for a in answers] == [
        ("0", 0.0, [7, 7, 7]),
        ("1", 1.0, [7, 7, 7]),
        ("2", 2.0, [7, 7, 7]),
    ]


async def test_the_reply_to_another_request_is_an_error_that_names_both():
    with pytest.raises(RolloutError, match="request 5/1 was answered with the reply to 5/0"):
        await workflow().run(Engine(mixes_up=True), PROMPT, 5)
