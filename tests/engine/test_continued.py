"""An answer that another engine has begun goes on as if it had never moved."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from served import publish, serving
from tiny_engine import ask, character_tokenizer, drain, engine_of, prompt_of, run_all, score, tiny_model

from fleuve.contracts import ContinuingEngine
from fleuve.control.fleet import Fleet
from fleuve.engine.engine import Engine, RequestError
from fleuve.rollout.client import EngineClient
from fleuve.types import Completion, GenerationRequest, Progress


def begun(engine: Engine, request: GenerationRequest, steps: int) -> Progress:
    """What has come of `request` after some steps on `engine`."""
    engine.add(request)
    for _ in range(steps):
        engine.step()
    (progress,) = engine.progress({request.request_id: 0})
    return progress


def continued(request: GenerationRequest, progress: Progress) -> GenerationRequest:
    return msgspec.structs.replace(request, output_ids=progress.output_ids.tolist())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
@pytest.mark.parametrize("steps", [1, 7, 30])
def test_what_another_engine_samples_from_there_on_is_what_the_first_would_have(sampling, steps):
    model = tiny_model()
    request = ask("a", prompt_of(1, 9), 40, seed=12, **sampling)
    whole = run_all(engine_of(model), [request])["a"]
    first = begun(engine_of(model), request, steps)
    rest = run_all(engine_of(model, version=3), [ask("b", prompt_of(2, 5)), continued(request, first)])["a"]
    assert 0 < len(first.output_ids) < 40
    assert [*first.output_ids.tolist(), *rest.output_ids] == whole.output_ids
    assert [*first.logprobs.tolist(), *rest.logprobs] == pytest.approx(whole.logprobs, abs=1e-4)
    assert set(first.versions.tolist()) == {0}
    assert set(rest.versions) == {3}
    assert rest.finish_reason == whole.finish_reason == "length"


def test_the_answers_of_a_group_still_share_their_prompt():
    model = tiny_model()
    requests = [ask(i, prompt_of(1, 60), 20, seed=i) for i in range(4)]
    first = engine_of(model)
    parts = [begun(first, request, 3) for request in requests]
    second = engine_of(model)
    run_all(second, [continued(*pair) for pair in zip(requests, parts, strict=True)])
    answers = sum(len(part.output_ids) for part in parts)
    assert second.metrics()["tokens_prefilled"] <= 60 + answers + 4


def test_a_stop_string_that_lies_across_the_move_still_ends_the_answer():
    model, tokenizer = tiny_model(), character_tokenizer()
    request = ask("a", prompt_of(1, 9), 40, seed=5)
    whole = run_all(engine_of(model, tokenizer=tokenizer), [request])["a"]
    text = tokenizer.decode(whole.output_ids)
    stop = text[9:13]
    at = text.index(stop) + 2
    request = ask("a", prompt_of(1, 9), 40, seed=5, stop=(stop,))
    stopped = run_all(engine_of(model, tokenizer=tokenizer), [request])["a"]
    assert stopped.finish_reason == "stop"
    given = msgspec.structs.replace(request, output_ids=whole.output_ids[:at])
    rest = run_all(engine_of(model, tokenizer=tokenizer), [given])["a"]
    assert [*whole.output_ids[:at], *rest.output_ids] == stopped.output_ids
    assert rest.finish_reason == "stop"


def test_progress_tells_what_is_not_known_yet_and_leaves_out_what_is_not_in_flight():
    engine = engine_of(tiny_model())
    request = ask("a", prompt_of(1, 9), 20)
    first = begun(engine, request, 5)
    for _ in range(4):
        engine.step()
    (more,) = engine.progress({"a": len(first.output_ids), "nobody": 0})
    assert more.start == len(first.output_ids)
    completion = drain(engine)["a"]
    both = [*first.output_ids.tolist(), *more.output_ids.tolist()]
    assert both == completion.output_ids[: len(both)]
    assert engine.progress({"a": 0}) == []


@pytest.mark.parametrize(
    ("given", "said"), [([5] * 20, "20 tokens, and max_new_tokens is 20"), ([5, 99], "vocabulary of 99"), ([-1], "99")]
)
def test_a_beginning_that_cannot_be_is_refused(given, said):
    request = msgspec.structs.replace(ask("a", prompt_of(1, 9), 20), output_ids=given)
    with pytest.raises(RequestError, match=said):
        engine_of(tiny_model()).add(request)


async def test_a_client_sees_the_progress_and_another_engine_goes_on_from_it(model_dir):
    request = ask("a", prompt_of(1, 9), 120, seed=3)
    async with serving(model_dir) as first, serving(model_dir, version=2) as second:
        async with EngineClient("one", first.url, 60, 60) as one, EngineClient("two", second.url, 60, 60) as two:
            assert isinstance(one, ContinuingEngine)
            whole = await two.generate(request)
            answer = asyncio.ensure_future(one.generate(request))
            progress: list[Progress] = []
            async with asyncio.timeout(30):
                while not progress or len(progress[0].output_ids) < 5:
                    progress = await one.progress({"a": 0, "b": 0})
            answer.cancel()
            rest = await two.generate(continued(request, progress[0]))
    assert progress[0].request_id == rest.request_id == "a"
    assert [*progress[0].output_ids, *rest.output_ids] == list(whole.output_ids)


async def test_an_answer_that_moved_has_the_logprobs_of_the_versions_that_it_names(model_dir, tmp_path, store):
    """Real engines, a real fleet: the first dies in the middle, the second has newer weights by then."""
    prompt, request = prompt_of(1, 9), ask("a", prompt_of(1, 9), 400, seed=3)
    async with serving(model_dir, weights=tmp_path) as second:
        async with serving(model_dir, weights=tmp_path) as first:
            async with EngineClient("one", first.url, 60, 60) as one, EngineClient("two", second.url, 60, 60) as two:
                fleet = Fleet([one, two], seed=0)
                fleet.remove("worker-1")  # the group goes to the first
                async with fleet.worker(1) as lease:
                    answer = asyncio.ensure_future(lease.generate(request))
                    (life,) = [life for life in fleet.lives() if life.engine is one]
                    async with asyncio.timeout(30):
                        while not life.begun or len(life.begun["a"]) < 20:
                            await asyncio.sleep(0.01)
                            await fleet.collect(life)
                    fleet.workers["worker-1"].leaving = False
                    fleet.settle(fleet.workers["worker-1"])
                    await two.update_weights(publish(store, 1), "recompute")
                    fleet.weights = publish(store, 1)
                    fleet.lose(life, "killed")
                    completion = await answer
    assert len(completion.output_ids) == len(completion.logprobs) == len(completion.versions) == 400
    assert set(completion.versions) == {0, 1}
    assert fleet.kept >= 20
    for version, model in ((0, tiny_model()), (1, tiny_model(1001))):
        scores = score(model, prompt, completion.output_ids)
        own = [i for i, v in enumerate(completion.versions) if v == version]
        assert [completion.logprobs[i] for i in own] == pytest.approx([scores[i] for i in own], abs=1e-4)


def test_weights_that_change_meanwhile_stamp_the_new_tokens_alone():
    model = tiny_model()
    request = ask("a", prompt_of(1, 9), 30, seed=1)
    part = begun(engine_of(model), request, 10)
    rest: Completion = run_all(engine_of(model, version=7), [continued(request, part)])["a"]
    assert len(rest.output_ids) == len(rest.logprobs) == len(rest.versions) == 30 - len(part.output_ids)
