"""`fleuve eval` on a tiny random model, with a real engine and real verifiers."""

import json
from pathlib import Path

import psutil
import pytest
from tiny_model import save_tiny_model

from fleuve.errors import UserError
from fleuve.evaluate.command import eval_settings, run_eval, table


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Four of mathematics and two of programs."""
    path = tmp_path / "test.jsonl"
    given = [{"question": f"{i}+{i}?", "answer": f"#### {2 * i}"} for i in range(4)]
    given += [{"question": "f", "tests": ["assert f(1) == 1"], "verifier": "code", "level": i} for i in (1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def test_it_samples_scores_and_leaves_nothing_behind(model: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    values = {"samples": 4, "temperature": 1.0, "limit": 5, "output": str(output), "by": "level"}
    flags = ["--data.prompt_field", "question", "--rollout.max_new_tokens", "12", "--rollout.threads", "1"]
    flags += ["--reward.deadline", "60"]
    settings = eval_settings(str(model), str(rows), values, flags)
    seen: list[tuple[int, int]] = []
    before = set(psutil.Process().children(recursive=True))  # of other tests' fixtures
    result = run_eval(settings, progress=lambda done, of: seen.append((done, of)))
    assert (result.problems, result.samples, result.version, result.no_verdict) == (5, 4, 0, 0)
    assert result.accuracy is not None
    assert 0.0 < result.length_mean <= 12.0
    assert seen[-1] == (20, 20)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(answers) == 20
    assert len({a["text"] for a in answers}) > 10
    assert answers[0]["prompt"].endswith(("?", "f"))
    assert {answer["verifier"] for answer in answers} == {"math", "code"}
    assert {"verifier=code", "verifier=math", "level=none"} < set(result.parts)
    assert f"accuracy     {result.accuracy:.3f}" in table(result, settings)
    assert not set(psutil.Process().children(recursive=True)) - before


def test_what_cannot_be_evaluated_is_said_before_anything_starts(model: Path, rows: Path) -> None:
    fields = ["--data.prompt_field", "question"]
    for data, flags, message in (
        (str(rows), [], 'no field "prompt"; it has "question", "answer"'),
        (str(rows), [*fields, "--data.verifier", "maths"], "did you mean 'math'"),
        (str(rows), [*fields, "--rollout.max_new_tokens", "126"], "more than the model's context of 128"),
        (
            str(rows),
            [*fields, "--rollout.kv_cache_tokens", "80", "--rollout.max_new_tokens", "70"],
            "give it 128 or more",
        ),
        (str(rows.with_name("tset.jsonl")), fields, "no such file; did you mean"),
        ("procedural:chain", [], "--limit"),
        (str(rows), [*fields, "--data.verifier", "code"], "test.jsonl:1: verifier code: the row has no tests"),
        (str(rows), [*fields, "--rollout.max_new_tokens", "9", "--by", "qestion"], "did you mean question?"),
        (str(rows), [*fields, "--output", str(rows)], "there are answers in it already"),
    ):
        with pytest.raises(UserError) as error:
            run_eval(eval_settings(str(model), data, {}, flags))
        assert message in str(error.value)
    for values, flags, message in (
        ({"samples": 2}, fields, "at temperature 0 gives the same answer 2 times"),
        ({"samples": 0}, fields, "samples = 0: must be more than 0"),
        ({}, ["--data.promt_field", "question"], "did you mean --data.prompt_field?"),
    ):
        with pytest.raises(UserError) as error:
            eval_settings(str(model), str(rows), values, flags)
        assert message in str(error.value)
    with pytest.raises(UserError, match="MODEL"):
        run_eval(eval_settings(str(model) + "x", str(rows), {}, fields))
