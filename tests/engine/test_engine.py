"""The engine's answers against transformers' own, and against themselves under other circumstances."""

from __future__ import annotations

import pytest
import torch
from tiny_engine import ask, by_id, character_tokenizer, drain, engine_of, prompt_of, run_all, score, tiny_model

from fleuve.engine.engine import RequestError
from fleuve.engine.scheduler import Copy

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.4},
}


RARE = {"gemma", "smollm3", "granite", "cohere"}
"""Those whose specialities another has too: a slow test each."""


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.slow) if family in RARE else family for family in FAMILIES]
)
def test_greedy_answers_are_those_of_transformers_generate(family: str) -> None:
    model = tiny_model(model_type=family, **FAMILIES[family])
    prompts = [prompt_of(i, 2 + 11 * i) for i in range(9)]
    requests = [ask(i, p, new=10 + 9 * i, temperature=0.0) for i, p in enumerate(prompts)]
    answers = run_all(engine_of(model, max_running=5, prefill_tokens=30), requests)
    model.set_attn_implementation("eager")
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        reference = model.generate(ids, max_new_tokens=10 + 9 * i, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert answers[str(i)].output_ids == reference[0, len(prompt) :].tolist()
        assert set(answers[str(i)].logprobs) == {0.0}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_logprobs_are_those_of_a_plain_forward_pass(family: str) -> None:
    model = tiny_model(model_type=family, **FAMILIES[family])
    requests = [ask(i, prompt_of(i, 3 + 20 * i), new=90, seed=i, temperature=0.5 + 0.3 * i) for i in range(5)]
    for r, answer in zip(requests, run_all(engine_of(model), requests).values(), strict=True):
        r = requests[int(answer.request_id)]
        want = score(model, r.input_ids, answer.output_ids, r.sampling.temperature)
        assert answer.logprobs == pytest.approx(want, abs=1e-4)


def test_an_answer_does_not_depend_on_what_else_is_in_the_batch() -> None:
    model = tiny_model()
    shapes = [(1, 70, 1.0, 0, 1.0), (40, 20, 0.7, 0, 0.9), (9, 50, 1.5, 20, 1.0), (70, 33, 1.0, 0, 1.0)]
    requests = [
        ask(i, prompt_of(i, length), new, seed=100 + i, temperature=t, top_k=k, top_p=p)
        for i, (length, new, t, k, p) in enumerate(shapes)
    ]
    together = run_all(engine_of(model), [*requests, *(ask(f"x{i}", prompt_of(50 + i, 25)) for i in range(9))])
    for request in requests:
        alone = run_all(engine_of(model), [request])[request.request_id]
        assert together[request.request_id].output_ids == alone.output_ids
        assert together[request.request_id].logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_another_seed_gives_another_answer() -> None:
    answers = run_all(engine_of(tiny_model()), [ask(seed, prompt_of(0, 5), seed=seed) for seed in range(5)])
    assert len({tuple(a.output_ids) for a in answers.values()}) == 5


def test_preemption_is_invisible_in_the_answers() -> None:
    model = tiny_model()
    requests = [ask(i, prompt_of(i, 20 + 7 * i), new=100, seed=i) for i in range(8)]
    roomy, tight = engine_of(model), engine_of(model, kv_cache_tokens=640)
    a, b = run_all(roomy, requests), run_all(tight, requests)
    assert roomy.metrics()["preemptions"] == 0
    assert tight.metrics()["preemptions"] > 2
    for request_id, answer in a.items():
        assert b[request_id].output_ids == answer.output_ids
        assert b[request_id].logprobs == pytest.approx(answer.logprobs, abs=1e-4)
        assert b[request_id].interruptions == 0


def test_sharing_the_prompt_s_prefill_is_invisible_in_the_answers() -> None:
    model = tiny_model()
    requests = [ask(i, prompt_of(0, 50), new=30, seed=i) for i in range(6)]
    shared = engine_of(model)
    together = run_all(shared, requests)
    assert shared.metrics()["tokens_prefilled"] == 50
    for request in requests:
        alone = run_all(engine_of(model), [request])[request.request_id]
        assert together[request.request_id].output_ids == alone.output_ids
        assert together[request.request_id].logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_late_sibling_copies_from_one_that_still_runs() -> None:
    model = tiny_model()
    engine = engine_of(model)
    engine.add(ask("early", prompt_of(0, 50), new=40, seed=1))
    for _ in range(10):
        engine.step()
    moves = []
    plan = engine.scheduler.plan
    engine.scheduler.plan = lambda *a, **k: (moves.extend((p := plan(*a, **k)).moves), p)[1]  # look on, change nothing
    late = run_all(engine, [ask("late", prompt_of(0, 50), new=40, seed=2)])["late"]
    assert [m.tokens for m in moves if isinstance(m, Copy)] == [49]
    assert late.logprobs == pytest.approx(score(model, prompt_of(0, 50), late.output_ids), abs=1e-4)


def test_answers_end_at_stop_tokens_eos_or_length() -> None:
    model = tiny_model()
    prompt = prompt_of(0, 9)
    free = run_all(engine_of(model), [ask("free", prompt, new=60, seed=4)])["free"]
    assert (len(free.output_ids), free.finish_reason) == (60, "length")
    ender = free.output_ids[30]
    first = free.output_ids.index(ender)
    stopped = run_all(engine_of(model), [ask("stop", prompt, new=60, seed=4, stop_token_ids=(ender,))])["stop"]
    assert (stopped.output_ids, stopped.finish_reason) == (free.output_ids[: first + 1], "stop")
    by_eos = run_all(engine_of(model, eos=[ender]), [ask("eos", prompt, new=60, seed=4, ignore_eos=False)])["eos"]
    assert by_eos.output_ids == stopped.output_ids
    ignored = run_all(engine_of(model, eos=[ender]), [ask("ignored", prompt, new=60, seed=4)])["ignored"]
    assert ignored.output_ids == free.output_ids


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it() -> None:
    model, tokenizer = tiny_model(), character_tokenizer()
    prompt = prompt_of(0, 9)
    free = run_all(engine_of(model), [ask("free", prompt, new=60, seed=4)])["free"]
    texts = [tokenizer.decode([t], skip_special_tokens=True) for t in free.output_ids]
    at = next(i for i in range(20, 60) if texts[i] and texts[i + 1] and texts[i + 2])
    stop = texts[at] + texts[at + 1] + texts[at + 2]
    engine = engine_of(model, tokenizer=tokenizer)
    stopped = run_all(engine, [ask("stop", prompt, new=60, seed=4, stop=("nowhere", stop))])["stop"]
    end = "".join(texts).index(stop) + len(stop)
    assert stopped.finish_reason == "stop"
    assert "".join(texts[: len(stopped.output_ids)]) == "".join(texts)[:end]


def test_an_aborted_request_answers_with_what_it_has() -> None:
    engine = engine_of(tiny_model(), max_running=1)
    engine.add(ask("running", prompt_of(0, 5), new=50))
    engine.add(ask("waiting", prompt_of(1, 5), new=50))
    engine.add(ask("other", prompt_of(2, 5), new=5))
    for _ in range(8):
        engine.step()
    running, waiting = engine.abort(["running", "unknown", "waiting"])
    assert (running.finish_reason, len(running.output_ids), len(running.logprobs)) == ("abort", 8, 8)
    assert (waiting.finish_reason, waiting.output_ids) == ("abort", [])
    assert list(drain(engine)) == ["other"]
    assert engine.metrics()["kv_cache_tokens_reserved"] == 0


def test_rows_are_reused_without_leaking_from_their_last_owner() -> None:
    model = tiny_model()
    engine = engine_of(model, max_running=3)
    for wave in range(4):  # long and short ones leave and join, rows move and slabs shrink and grow
        requests = [ask(f"{wave}-{i}", prompt_of(10 * wave + i, 5 + 30 * (i % 3)), new=9 + 25 * i) for i in range(5)]
        for request in requests:
            engine.add(request)
        answers = drain(engine)
        for request in requests:
            answer = answers[request.request_id]
            assert answer.logprobs == pytest.approx(score(model, request.input_ids, answer.output_ids), abs=1e-4)
    engine.step()
    assert not engine.runner.cache.slabs


def test_bf16_answers_have_the_logprobs_of_the_fp32_model_to_bf16_precision() -> None:
    exact = tiny_model(initializer_range=0.05)
    model = tiny_model(initializer_range=0.05).bfloat16()
    exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    request = ask("a", prompt_of(0, 40), new=100, seed=1)
    answer = run_all(engine_of(model), [request])["a"]
    assert answer.logprobs == pytest.approx(score(exact, request.input_ids, answer.output_ids), abs=0.05)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("a", []), "input_ids is empty"),
        (ask("a", [3, 99]), "vocabulary of 99"),
        (ask("a", [3], new=0), "at least 1"),
        (ask("a", [3], new=600), "context is 512"),
        (ask("a", [3], temperature=-1.0), "temperature"),
        (ask("a", [3], top_p=0.0), "top_p"),
        (ask("a", [3], top_k=-2), "top_k"),
        (ask("a", [3], stop=("x",)), "tokenizer"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_in_one_line(request_, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        engine_of(tiny_model()).add(request_)
    assert "\n" not in str(caught.value)


def test_a_request_id_in_use_is_refused() -> None:
    engine = engine_of(tiny_model())
    engine.add(ask("a", [3, 4]))
    with pytest.raises(RequestError, match="already in use"):
        engine.add(ask("a", [3, 4]))
    assert list(by_id(engine.step())) == []
