"""Counting an evaluation: what is solved, what has no verdict, and that it has one version."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fleuve.contracts import RolloutError
from fleuve.evaluate.evaluate import EvaluationResult, Generate, MixedVersionsError, evaluate
from fleuve.evaluate.in_run import set_name
from fleuve.types import Completion, GenerationRequest, Prompt, SamplingParams, Verdict


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


class Exact:
    """Scores as the text says: `none` has no verdict, else whether it is the answer."""

    async def score(self, prompt: Prompt, text: str) -> Verdict:
        await asyncio.sleep(0)
        return Verdict(score=None, reason="crashed") if text == "none" else Verdict(score=float(text == prompt.answer))


def prompts(*answers: str) -> list[Prompt]:
    return [
        Prompt(id=f"eval/{i}", input_ids=[i], text=f"{i}?", answer=answer, verifier="exact")
        for i, answer in enumerate(answers)
    ]


def says(*table: Sequence[str], versions: Sequence[int] = (3,)) -> Generate:
    """An engine that says `table[problem][sample]`."""

    async def generate(request: GenerationRequest) -> Completion:
        await asyncio.sleep(0)
        text = table[request.input_ids[0]][int(request.request_id.rpartition("/")[2])]
        return Completion(
            request_id=request.request_id,
            output_ids=[ord(c) for c in text],
            logprobs=[0.0] * len(text),
            versions=[versions[i % len(versions)] for i in range(len(text))],
            finish_reason="length" if text == "long" else "stop",
        )

    return generate


async def run(generate: Generate, *answers: str, samples: int = 1, **options: object) -> EvaluationResult:
    sampling = SamplingParams(max_new_tokens=8)
    return await evaluate(generate, Exact(), decode, prompts(*answers), sampling, samples=samples, **options)


async def test_accuracy_and_pass_at_k() -> None:
    table = (["a", "x", "x", "x"], ["b", "b", "b", "b"], ["x", "x", "long", "x"])
    result = await run(says(*table), "a", "b", "c", samples=4)
    assert result.accuracy == pytest.approx((0.25 + 1 + 0) / 3)
    assert result.pass_at == pytest.approx({1: result.accuracy, 2: (0.5 + 1 + 0) / 3, 4: 2 / 3})
    assert result.low < result.accuracy < result.high
    assert result.truncated == pytest.approx(1 / 12)
    assert result.length_mean == pytest.approx(15 / 12)
    assert result.version == 3
    assert result.no_verdict == 0


async def test_an_answer_without_a_verdict_is_left_out_and_not_wrong() -> None:
    result = await run(says(["a", "none"], ["none", "none"]), "a", "b", samples=2)
    assert result.accuracy == 1.0
    assert result.no_verdict == 3
    assert result.pass_at == {1: 1.0}


async def test_no_verdict_at_all_has_no_accuracy() -> None:
    result = await run(says(["none"]), "a")
    assert result.accuracy is None
    assert result.metrics("set")["eval/set/no_verdict"] == 1.0
    assert "eval/set/pass@1" not in result.metrics("set")


@pytest.mark.parametrize("versions", [(3, 4), (4, 3)])
async def test_an_evaluation_that_met_an_update_is_refused(versions: Sequence[int]) -> None:
    with pytest.raises(MixedVersionsError, match="versions 3, 4"):
        await run(says(["ab"], versions=versions), "a")


async def test_versions_may_not_differ_between_answers_either() -> None:
    version = 0

    async def generate(request: GenerationRequest) -> Completion:
        nonlocal version
        version += 1
        return Completion(request_id="", output_ids=[97], logprobs=[0.0], versions=[version], finish_reason="stop")

    with pytest.raises(MixedVersionsError):
        await run(generate, "a", "b")


async def test_an_aborted_answer_is_an_error() -> None:
    async def generate(request: GenerationRequest) -> Completion:
        return Completion(request_id="r", output_ids=[], logprobs=[], versions=[], finish_reason="abort")

    with pytest.raises(RolloutError, match="aborted"):
        await run(generate, "a")


async def test_each_answer_has_its_own_seed_and_the_same_one_in_the_next_evaluation() -> None:
    async def seeds(seed: int) -> dict[str, int]:
        found: dict[str, int] = {}
        says_x = says(["x"] * 3, ["x"] * 3)

        async def generate(request: GenerationRequest) -> Completion:
            found[request.request_id] = request.sampling.seed
            return await says_x(request)

        await run(generate, "a", "b", samples=3, seed=seed)
        return found

    first = await seeds(0)
    assert len(set(first.values())) == len(first) == 6
    assert await seeds(0) == first
    assert set((await seeds(1)).values()).isdisjoint(first.values())


async def test_no_more_answers_are_in_flight_than_allowed() -> None:
    now = most = 0
    says_x = says(["x"] * 40)

    async def generate(request: GenerationRequest) -> Completion:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return await says_x(request)

    await run(generate, "a", samples=40, concurrency=5)
    assert most == 5


async def test_every_answer_is_written_with_its_verdict(tmp_path: Path) -> None:
    path = tmp_path / "out" / "answers.jsonl"
    await run(says(["a", "none"], ["x", "b"]), "a", "b", samples=2, output=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines.sort(key=lambda r: (r["problem"], r["sample"]))
    assert [(r["problem"], r["sample"], r["text"], r["score"]) for r in lines] == [
        ("eval/0", 0, "a", 1.0),
        ("eval/0", 1, "none", None),
        ("eval/1", 0, "x", 0.0),
        ("eval/1", 1, "b", 1.0),
    ]
    assert lines[1]["reason"] == "crashed"


async def test_what_was_scored_is_there_when_the_evaluation_fails(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    says_a, calls = says(["a"] * 9), 0

    async def generate(request: GenerationRequest) -> Completion:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RolloutError("the engine died")
        return await says_a(request)

    with pytest.raises(RolloutError, match="the engine died"):
        await run(generate, "a", samples=9, concurrency=1, output=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["sample"], r["score"]) for r in lines] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]


async def test_an_answer_is_written_before_the_next_one_is_there(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    written: list[int] = []
    await run(
        says(["a", "none", "x"]),
        "a",
        samples=3,
        output=path,
        progress=lambda done, of: written.append(path.read_bytes().count(b"\n")),
    )
    assert written == [1, 2, 3]


async def test_parts_by_verifier_and_by_a_field() -> None:
    rows = [
        Prompt(id=str(i), input_ids=[i], text="?", answer="a", verifier=verifier, row=row)
        for i, (verifier, row) in enumerate([("exact", {"level": 1}), ("math", {"level": 2}), ("math", {})])
    ]
    table = says(["a", "a"], ["a", "x"], ["none", "none"])
    result = await evaluate(table, Exact(), decode, rows, SamplingParams(max_new_tokens=8), samples=2, by="level")
    assert {label: (part.problems, part.accuracy, part.no_verdict) for label, part in result.parts.items()} == {
        "level=1": (1, 1.0, 0),
        "level=2": (1, 0.5, 0),
        "level=none": (1, None, 2),
        "verifier=exact": (1, 1.0, 0),
        "verifier=math": (2, 0.5, 2),
    }
    assert result.why == "crashed"
    assert result.metrics("set")["eval/set/verifier_math/pass@2"] == 1.0
    plain = await evaluate(table, Exact(), decode, rows[1:], SamplingParams(max_new_tokens=8), samples=2)
    assert plain.parts == {}


async def test_metrics_are_named_after_the_set() -> None:
    metrics = (await run(says(["a", "x"]), "a", samples=2)).metrics("chain")
    assert metrics["eval/chain/pass@1"] == 0.5
    assert metrics["eval/chain/pass@2"] == 1.0


def test_set_names() -> None:
    assert set_name("procedural:chain?median=3") == "chain"
    assert set_name("some/folder/gsm8k_test.jsonl") == "gsm8k_test"


async def test_pass_at_all_samples_is_reported_where_their_number_is_no_power_of_two() -> None:
    result = await run(says(["a", "x", "x"], ["x", "x", "x"]), "a", "b", samples=3)
    assert result.pass_at == pytest.approx({1: 1 / 6, 2: 1 / 3, 3: 1 / 2})


async def test_more_answers_to_the_same_problems_do_not_pass_for_more_problems() -> None:
    few = await run(says(["a"], ["x"]), "a", "b", samples=1)
    many = await run(says(["a"] * 50, ["x"] * 50), "a", "b", samples=50)
    assert (few.low, few.high) == pytest.approx((many.low, many.high))
