"""How answers end: by themselves, by a limit, by an abort; what cannot be answered is refused, and nothing is lost."""

from __future__ import annotations

import asyncio
import time

import pytest
from subject import Subject

from fleuve.contracts import ContinuingEngine, RolloutError, WorkerLostError
from fleuve.modeling.tokenizer import load_tokenizer
from fleuve.types import GenerationRequest, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="session")


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_an_answer_ends_at_the_model_s_own_end_unless_that_is_ignored(subject: Subject) -> None:
    prompts = [subject.prompt(i, 6) for i in range(24)]
    requests = [subject.ask(p, 120, seed=i, ignore_eos=False) for i, p in enumerate(prompts)]
    answers = await subject.answers(requests)
    ended = [(r, a) for r, a in zip(requests, answers, strict=True) if a.finish_reason == "stop"]
    assert ended, "none of 24 answers came to its own end within 120 tokens"
    for request, answer in zip(requests, answers, strict=True):
        at = [t for t, token in enumerate(answer.output_ids) if token in subject.eos]
        assert at == ([len(answer.output_ids) - 1] if answer.finish_reason == "stop" else [])
        subject.true(request, answer)
    ignoring = [subject.ask(r.input_ids, len(a.output_ids) + 3, seed=r.sampling.seed) for r, a in ended[:4]]
    for request, answer in zip(ignoring, await subject.answers(ignoring), strict=True):
        assert (len(answer.output_ids), answer.finish_reason) == (request.sampling.max_new_tokens, "length")


async def test_an_answer_ends_with_the_first_of_its_stop_tokens(subject: Subject) -> None:
    prompt = subject.prompt(1)
    (free,) = await subject.answers([subject.ask(prompt, 60, temperature=0.0)])
    for ender in (free.output_ids[0], free.output_ids[25]):
        first = free.output_ids.index(ender)
        (answer,) = await subject.answers([subject.ask(prompt, 60, temperature=0.0, stop_token_ids=(ender,))])
        assert answer.output_ids[-1] == ender
        assert answer.finish_reason == "stop"
        if "same-seed" not in subject.promise.lacks:
            assert answer.output_ids == free.output_ids[: first + 1]


async def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(subject: Subject) -> None:
    subject.needs("stop-strings")
    tokenizer = load_tokenizer(subject.scorer.model.config._name_or_path)
    prompt = subject.prompt(2)
    (free,) = await subject.answers([subject.ask(prompt, 60, temperature=0.0)])
    text = tokenizer.decode(free.output_ids[10:13], skip_special_tokens=True)
    assert text
    asked = subject.ask(prompt, 60, temperature=0.0, stop=("nowhere to be found", text))
    (answer,) = await subject.answers([asked])
    assert answer.finish_reason == "stop"
    assert text in tokenizer.decode(answer.output_ids, skip_special_tokens=True)
    assert text not in tokenizer.decode(answer.output_ids[:-1], skip_special_tokens=True)


async def test_one_token_may_be_all_and_a_prompt_may_fill_the_context(subject: Subject) -> None:
    context = subject.scorer.context
    requests = [subject.ask(subject.prompt(3, 9), 1), subject.ask(subject.prompt(4, context - 1), 1)]
    for request, answer in zip(requests, await subject.answers(requests), strict=True):
        assert (len(answer.output_ids), answer.finish_reason) == (1, "length")
        subject.true(request, answer)


# --- aborts ---------------------------------------------------------------------------------------------------------


async def test_an_aborted_answer_comes_with_what_it_has_and_its_id_is_free_again(subject: Subject) -> None:
    kept, ended = subject.ask(subject.prompt(0), subject.long), subject.ask(subject.prompt(1), subject.long)
    keeping, ending = await subject.begin(kept, ended, tokens=8)
    await subject.engine.abort([ended.request_id])
    answer = await asyncio.wait_for(ending, 20)
    assert answer.finish_reason == "abort"
    assert len(answer.output_ids) == len(answer.logprobs) == len(answer.versions) < subject.long
    if answer.output_ids:
        subject.true(ended, answer)
    (again,) = await subject.answers([subject.ask(subject.prompt(1), 5, name=ended.request_id)])
    assert len(again.output_ids) == 5
    whole = await keeping
    assert len(whole.output_ids) == subject.long
    subject.true(kept, whole)


async def test_many_are_aborted_at_once_twice_and_unknown_ones_are_passed_over(subject: Subject) -> None:
    requests = [subject.ask(subject.prompt(i), subject.long) for i in range(64)]  # some of them wait for their turn
    answering = await subject.begin(*requests, tokens=20)
    names = [request.request_id for request in requests]
    await subject.engine.abort(["never-heard-of", *names[::2], *names[:4]])
    await subject.engine.abort([*names, "never-heard-of"])
    await subject.engine.abort(names)
    await subject.engine.abort([])
    answers = await asyncio.wait_for(asyncio.gather(*answering), 30)
    assert {a.finish_reason for a in answers} == {"abort"}
    assert {a.request_id for a in answers} == set(names)


async def test_a_request_that_nobody_waits_for_any_more_is_given_up(subject: Subject) -> None:
    (answering,) = await subject.begin(subject.ask(subject.prompt(0), 2 * subject.long))
    answering.cancel()
    await subject.until(lambda m: not m["running"])


# --- what cannot be -------------------------------------------------------------------------------------------------


def refused(subject: Subject) -> dict[str, GenerationRequest]:
    """Requests with something wrong."""
    fine, beyond, context = subject.prompt(0), subject.scorer.vocabulary, subject.scorer.context
    return {
        "an empty prompt": subject.ask([], 5),
        "an id beyond the vocabulary": subject.ask([*fine, beyond], 5),
        "a negative id": subject.ask([-1, *fine], 5),
        "longer than the context": subject.ask(fine, context),
        "a prompt longer than the context": subject.ask(subject.prompt(1, context + 1), 1),
        "no token to sample": subject.ask(fine, 0),
        "a negative temperature": subject.ask(fine, 5, temperature=-1.0),
        "top_p above 1": subject.ask(fine, 5, top_p=1.5),
        "top_p 0": subject.ask(fine, 5, top_p=0.0),
    }


async def test_what_cannot_be_answered_is_refused_and_the_engine_goes_on(subject: Subject) -> None:
    running = subject.ask(subject.prompt(0), subject.long, seed=1)
    (answering,) = await subject.begin(running)
    for name, request in refused(subject).items():
        with pytest.raises(RolloutError) as error:
            await asyncio.wait_for(subject.generate(request), 20)
        assert not isinstance(error.value, WorkerLostError), name
        assert "\n" not in str(error.value), name
    subject.true(running, await answering)


async def test_an_id_that_is_in_use_is_refused(subject: Subject) -> None:
    request = subject.ask(subject.prompt(0), subject.long)
    (answering,) = await subject.begin(request)
    with pytest.raises(RolloutError):
        await asyncio.wait_for(subject.generate(request), 20)
    assert len((await answering).output_ids) == subject.long


# --- load -----------------------------------------------------------------------------------------------------------


async def test_of_64_answers_at_once_none_is_lost_or_mixed_up_when_new_weights_come(subject: Subject) -> None:
    requests = [subject.ask(subject.prompt(i // 4, 8 + i // 2), 30 + i, seed=i) for i in range(64)]
    answering = await subject.begin(*requests, tokens=600)
    await subject.update()
    answers = await asyncio.wait_for(asyncio.gather(*answering), 120)
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.output_ids) == request.sampling.max_new_tokens
        subject.true(request, answer)
    assert {v for a in answers for v in a.versions} == {subject.version - 1, subject.version}


async def test_health_is_told_at_once_whatever_is_computed_and_while_paused(subject: Subject) -> None:
    requests = [subject.ask(subject.prompt(i, 400), 60, seed=i) for i in range(16)]
    answering = [asyncio.create_task(subject.generate(r)) for r in requests]
    slowest = 0.0
    for paused in (False, True):
        if paused:
            await subject.engine.pause()
        for _ in range(10):
            asked = time.perf_counter()
            assert await subject.engine.health() == subject.version
            slowest = max(slowest, time.perf_counter() - asked)
            await asyncio.sleep(0.01)
    await subject.engine.resume()
    await asyncio.gather(*answering)
    assert slowest < 2.0


async def test_metrics_count_what_was_sampled_and_what_is_in_flight(subject: Subject) -> None:
    before = await subject.engine.metrics()
    assert (before["running"], before["waiting"]) == (0, 0)
    await subject.answers([subject.ask(subject.prompt(i), 20) for i in range(10)])
    after = await subject.engine.metrics()
    assert after["tokens_generated"] - before["tokens_generated"] == 200
    await subject.engine.pause()
    waiting = [asyncio.create_task(subject.generate(subject.ask(subject.prompt(i), 5))) for i in range(3)]
    await subject.until(lambda m: m["running"] + m["waiting"] == 3)
    await subject.engine.resume()
    await asyncio.gather(*waiting)


# --- answers that move ----------------------------------------------------------------------------------------------


async def test_an_answer_that_another_engine_began_goes_on_behind_what_it_has(subject: Subject) -> None:
    engine = subject.engine
    if not isinstance(engine, ContinuingEngine):
        pytest.skip("the engine takes up no answers that others have begun, and says so by having no `progress`")
    request = subject.ask(subject.prompt(0), subject.long, seed=9)
    (answering,) = await subject.begin(request, tokens=10)
    (part,) = await engine.progress({request.request_id: 2, "never-heard-of": 0})
    whole = await answering
    known = [*whole.output_ids[:2], *part.output_ids.tolist()]
    assert (part.start, known) == (2, list(whole.output_ids[: len(known)]))
    assert part.logprobs.tolist() == pytest.approx(whole.logprobs[2 : len(known)])
    assert set(part.versions.tolist()) == {subject.version}
    given = GenerationRequest(
        request_id=f"{request.request_id}~1",
        input_ids=request.input_ids,
        sampling=request.sampling,
        output_ids=known,
    )
    (rest,) = await subject.answers([given])
    assert len(known) + len(rest.output_ids) == subject.long
    want = subject.scorer.logprobs(request.input_ids, [*known, *rest.output_ids], subject.version)
    subject.near(rest.logprobs, want[len(known) :].tolist())
    if "seeded-order" not in subject.promise.lacks:
        assert [*known, *rest.output_ids] == list(whole.output_ids)
    nothing_left = SamplingParams(max_new_tokens=len(known), ignore_eos=True)
    with pytest.raises(RolloutError):
        await engine.generate(
            GenerationRequest(request_id="full", input_ids=request.input_ids, sampling=nothing_left, output_ids=known)
        )
