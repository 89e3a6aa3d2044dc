"""What an engine says of its tokens is true: each log-probability is that of the distribution sampled from."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from scorer import filtered
from subject import Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_logprobs_are_those_that_the_trainer_finds(subject: Subject) -> None:
    lengths = [(1, 40), (9, 120), (70, 60), (200, 30)]
    requests = [subject.ask(subject.prompt(i, n), new, seed=i) for i, (n, new) in enumerate(lengths)]
    for request, answer in zip(requests, await subject.answers(requests), strict=True):
        assert len(answer.output_ids) == request.sampling.max_new_tokens
        assert answer.finish_reason == "length"
        subject.true(request, answer)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
async def test_the_temperature_divides_the_logits_and_not_the_logprobs(subject: Subject, temperature: float) -> None:
    request = subject.ask(subject.prompt(3), 80, temperature=temperature, seed=5)
    (answer,) = await subject.answers([request])
    subject.true(request, answer)


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.8},
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
async def test_tokens_come_from_the_enumerated_distribution_and_say_so(
    subject: Subject, sampling: dict[str, float]
) -> None:
    """Pitfall 15: with top-k and top-p, the distribution that is left, renormalised."""
    prompt = subject.prompt(11, 30)
    want = filtered(subject.scorer.scores(prompt, subject.version), **sampling)  # type: ignore[arg-type]
    requests = [subject.ask(prompt, 1, seed=1000 + i, **sampling) for i in range(100)]
    answers = await subject.answers(requests)
    drawn = Counter(answer.output_ids[0] for answer in answers)
    outside = [token for token in drawn if want[token] == 0]
    assert not outside, f"tokens {outside} were filtered out, and came all the same"
    subject.near([a.logprobs[0] for a in answers], [math.log(want[a.output_ids[0]]) for a in answers])
    seen = {token: count / len(answers) for token, count in drawn.items()}
    distance = sum(abs(seen.get(i, 0.0) - p) for i, p in enumerate(want.tolist())) / 2
    kept = int((want > 0).sum())
    assert distance < 0.06 + 0.5 * math.sqrt(kept / len(answers)), "the frequencies are not the probabilities"


async def test_at_temperature_0_the_likeliest_token_comes_with_certainty(subject: Subject) -> None:
    prompt = subject.prompt(4)
    (answer,) = await subject.answers([subject.ask(prompt, 30, temperature=0.0)])
    assert answer.logprobs == pytest.approx([0.0] * 30, abs=1e-6)
    for t in (0, 1, 15, 29):
        scores = subject.scorer.scores([*prompt, *answer.output_ids[:t]], subject.version)
        assert scores[answer.output_ids[t]] >= scores.max() - 10 * subject.promise.worst


async def test_the_answers_of_a_group_differ_by_their_seeds(subject: Subject) -> None:
    prompt = subject.prompt(5)
    answers = await subject.answers([subject.ask(prompt, 40, temperature=1.5, seed=i) for i in range(8)])
    assert len({tuple(a.output_ids) for a in answers}) == 8


async def test_the_same_seed_gives_the_same_answer_whatever_else_is_in_the_batch(subject: Subject) -> None:
    subject.needs("same-seed")
    shapes = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.4, "top_k": 20}]
    watched = [subject.ask(subject.prompt(i, 20 + 30 * i), 60, seed=7 + i, **s) for i, s in enumerate(shapes)]
    alone = [(await subject.answers([request]))[0] for request in watched]
    crowd = [subject.ask(subject.prompt(90 + i, 5 + 9 * i), 70, seed=i) for i in range(24)]
    together = (await subject.answers([*crowd[:12], *watched, *crowd[12:]]))[12:15]
    for one, among in zip(alone, together, strict=True):
        assert one.output_ids == among.output_ids
        subject.near(one.logprobs, among.logprobs)


async def test_sharing_a_prompt_is_invisible_in_the_answers(subject: Subject) -> None:
    prompt = subject.prompt(6, 150)
    requests = [subject.ask(prompt, 25, seed=i) for i in range(8)]
    for request, answer in zip(requests, await subject.answers(requests), strict=True):
        subject.true(request, answer)
