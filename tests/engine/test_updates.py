"""Weight updates in the middle of answers: versions and log-probabilities stay true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_engine import ask, by_id, drain, engine_of, prompt_of, run_all, score, tiny_model
from torch import Tensor

from fleuve.engine.engine import Engine, NotFiniteError, Outcome, Update
from fleuve.engine.parameters import WeightsMismatchError
from fleuve.modeling.forward import hidden_states, logits


def weights_of(version: int, **changes: object) -> dict[str, Tensor]:
    """Each version is another random model; the same names as a trainer publishes."""
    return {n: p.detach().clone() for n, p in tiny_model(1000 + version, **changes).named_parameters()}


def model_of(version: int, **changes: object) -> torch.nn.Module:
    return tiny_model(1000 + version, **changes)


def swap(engine: Engine, version: int, interrupt: str, tensors_of: Callable[[int], dict] = weights_of) -> Update:
    update = Update(version=version, tensors=tensors_of(version), interrupt=interrupt)
    engine.parameters.check(update.tensors)
    engine.request_update(update)
    return update


def run_with_updates(engine: Engine, requests, at: dict[int, int], interrupt: str, tensors_of=weights_of):
    """All answers, with an update to version `at[step]` before these steps."""
    for request in requests:
        engine.add(request)
    answers, step = {}, 0
    while not engine.idle:
        if step in at:
            swap(engine, at[step], interrupt, tensors_of)
        answers |= by_id(engine.step())
        step += 1
    return answers


def assert_true_logprobs(answers, requests, model_of) -> set[int]:
    """Each token's is that of the model of its version, re-scored; returns the versions that there are."""
    for request in requests:
        answer = answers[request.request_id]
        for version in set(answer.versions):
            want = score(model_of(version), request.input_ids, answer.output_ids)
            got = [(p, w) for p, w, v in zip(answer.logprobs, want, answer.versions, strict=True) if v == version]
            assert [p for p, _ in got] == pytest.approx([w for _, w in got], abs=1e-4)
    return {version for answer in answers.values() for version in answer.versions}


REQUESTS = [ask(i, prompt_of(i // 3, 10 + 25 * (i // 3)), new=20 + 11 * i, seed=i) for i in range(9)]  # groups of 3


@pytest.mark.parametrize("prefill_tokens", [400, 37])
def test_recompute_every_segment_has_the_logprobs_of_its_own_version(prefill_tokens: int) -> None:
    engine = engine_of(model_of(0), prefill_tokens=prefill_tokens)
    answers = run_with_updates(engine, REQUESTS, {7: 1, 19: 2, 20: 3, 45: 5}, "recompute")
    for request in REQUESTS:
        answer = answers[request.request_id]
        assert len(answer.output_ids) == request.sampling.max_new_tokens
        assert answer.versions == sorted(answer.versions)
    assert_true_logprobs(answers, REQUESTS, model_of)
    longest = answers["8"]
    assert set(longest.versions) == {0, 1, 2, 3, 5} - ({2} if 2 not in longest.versions else set())
    assert longest.interruptions == 4
    assert len(set(longest.versions)) >= 4


class Replay:
    """One sequence's attention with its own plain cache, to feed tokens under whatever weights one likes."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer, query, key, value, scale, window, softcap) -> Tensor:
        if layer in self.kept:
            key, value = torch.cat([self.kept[layer][0], key]), torch.cat([self.kept[layer][1], value])
        self.kept[layer] = (key, value)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        position = torch.arange(len(key))
        scores = scores.masked_fill(position > position[-len(query) :, None], -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def test_keep_goes_on_under_the_old_cache() -> None:
    engine = engine_of(model_of(0), prefill_tokens=400)
    answers = run_with_updates(engine, REQUESTS, {7: 1, 19: 2, 45: 5}, "keep")
    models = {v: model_of(v) for v in (0, 1, 2, 5)}
    for request in REQUESTS:
        answer = answers[request.request_id]
        replay, fed = Replay(), 0
        tokens = [*request.input_ids, *answer.output_ids]
        for t, (token, version) in enumerate(zip(answer.output_ids, answer.versions, strict=True)):
            end = len(request.input_ids) + t
            with torch.inference_mode():
                ids, at = torch.tensor(tokens[fed:end]), torch.arange(fed, end)
                last = logits(models[version], hidden_states(models[version], ids, at, replay)[-1:])
            assert answer.logprobs[t] == pytest.approx(last.log_softmax(-1)[0, token].item(), abs=1e-4)
            fed = end
    assert set(answers["8"].versions) == {0, 1, 2, 5}
    assert answers["8"].interruptions == 3


def test_finish_lets_running_answers_end_in_their_version_and_others_wait() -> None:
    engine = engine_of(model_of(0), max_running=3)
    for request in REQUESTS:
        engine.add(request)
    for _ in range(5):
        engine.step()
    update = swap(engine, 1, "finish")
    outcome, answers = Outcome(), {}
    while not outcome.updated:
        outcome = engine.step()
        answers |= by_id(outcome)
    assert outcome.updated == [update]
    assert update.result is not None
    assert update.result.interrupted == 0
    assert {i for i, a in answers.items() if set(a.versions) == {0}} == {"0", "1", "2"}
    rest = drain(engine)
    assert all(set(a.versions) == {1} and a.interruptions == 0 for a in rest.values())
    assert len(rest) == 6


@pytest.mark.parametrize("interrupt", ["recompute", "keep"])
def test_after_an_update_nothing_is_sampled_from_older_weights(interrupt: str) -> None:
    engine = engine_of(model_of(0))
    for request in REQUESTS:
        engine.add(request)
    for _ in range(10):
        engine.step()
    counts = {s.request.request_id: s.num_output for s in engine.scheduler.running}
    update = swap(engine, 1, interrupt)
    outcome = engine.step()
    assert update in outcome.updated
    assert update.result is not None
    assert update.result.interrupted == len(counts) == 9
    answers = by_id(outcome) | drain(engine)
    for request_id, count in counts.items():
        assert set(answers[request_id].versions[count:]) == {1}


@pytest.mark.parametrize("interrupt", ["recompute", "keep"])
def test_a_cached_prompt_of_older_weights_serves_no_new_request(interrupt: str) -> None:
    engine = engine_of(model_of(0))
    engine.add(ask("old", prompt_of(0, 40), new=60))
    for _ in range(5):
        engine.step()
    swap(engine, 1, interrupt)
    engine.add(ask("new", prompt_of(0, 40), new=20, seed=1))
    answer = drain(engine)["new"]
    assert set(answer.versions) == {1}
    assert answer.logprobs == pytest.approx(score(model_of(1), prompt_of(0, 40), answer.output_ids), abs=1e-4)


def test_updates_during_preemption_and_a_long_prefill_stay_true() -> None:
    engine = engine_of(model_of(0), kv_cache_tokens=512, prefill_tokens=16)
    answers = run_with_updates(engine, REQUESTS, {3: 1, 30: 2, 31: 3, 100: 4}, "recompute")
    assert engine.metrics()["preemptions"] > 0
    for request in REQUESTS:
        answer = answers[request.request_id]
        for version in set(answer.versions):
            want = score(model_of(version), request.input_ids, answer.output_ids)
            for p, w, v in zip(answer.logprobs, want, answer.versions, strict=True):
                assert v != version or p == pytest.approx(w, abs=1e-4)


def test_an_older_version_that_arrives_late_is_acknowledged_and_not_loaded() -> None:
    engine = engine_of(model_of(0))
    first, late = swap(engine, 3, "recompute"), swap(engine, 2, "recompute")
    engine.step()
    assert first.result is not None
    assert late.result is not None
    assert (first.result.version, late.result.version, engine.version) == (3, 3, 3)
    answer = run_all(engine, [ask("a", prompt_of(0, 9))])["a"]
    assert answer.logprobs == pytest.approx(score(model_of(3), prompt_of(0, 9), answer.output_ids), abs=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda w: w.update(stray=torch.zeros(1)), "unknown: stray"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"wrong shape: model.norm.weight \(3,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_touched(change, words: str) -> None:
    engine = engine_of(model_of(0))
    weights = weights_of(1)
    change(weights)
    with pytest.raises(WeightsMismatchError, match=words):
        engine.parameters.check(weights)


def test_tied_weights_come_once() -> None:
    tied = {"tie_word_embeddings": True}
    engine = engine_of(model_of(0, **tied))
    weights = weights_of(1, **tied)
    assert "lm_head.weight" not in weights
    engine.parameters.check(weights)
    engine.request_update(Update(version=1, tensors=weights, interrupt="recompute"))
    answer = run_all(engine, [ask("a", prompt_of(0, 9))])["a"]
    assert answer.logprobs == pytest.approx(score(model_of(1, **tied), prompt_of(0, 9), answer.output_ids), abs=1e-4)


@pytest.mark.parametrize("interrupt", ["recompute", "keep"])
def test_broken_weights_fail_their_requests_and_good_ones_mend_the_engine(interrupt: str) -> None:
    engine = engine_of(model_of(0))
    broken = {name: torch.full_like(w, torch.nan) for name, w in weights_of(1).items()}
    engine.request_update(Update(version=1, tensors=broken, interrupt=interrupt))
    engine.add(ask("a", prompt_of(0, 9)))
    with pytest.raises(NotFiniteError, match="version 1"):
        drain(engine)
    swap(engine, 2, interrupt)
    answer = run_all(engine, [ask("b", prompt_of(0, 5))])["b"]
    assert answer.logprobs == pytest.approx(score(model_of(2), prompt_of(0, 5), answer.output_ids), abs=1e-4)


def test_after_broken_weights_nothing_of_them_is_left_in_the_cache() -> None:
    engine = engine_of(model_of(0), prefill_tokens=60)
    broken = {name: torch.full_like(w, torch.nan) for name, w in weights_of(1).items()}
    engine.request_update(Update(version=1, tensors=broken, interrupt="recompute"))
    engine.add(ask("fails", prompt_of(0, 25)))
    engine.add(ask("is still being prefilled", prompt_of(1, 50)))  # so its row, and with it the slab, stays
    assert [end[0] for end in engine.step().ended] == ["fails"]
    swap(engine, 2, "recompute")
    engine.add(ask("takes the free row", prompt_of(2, 5)))
    answers = drain(engine)
    for request_id, prompt in (("is still being prefilled", prompt_of(1, 50)), ("takes the free row", prompt_of(2, 5))):
        output = answers[request_id].output_ids
        assert answers[request_id].logprobs == pytest.approx(score(model_of(2), prompt, output), abs=1e-4)
