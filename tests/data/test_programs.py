"""Procedural programs: their tests expect what the words ask for, are hidden, and find mistakes."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from fleuve.config.settings import DataSettings
from fleuve.data.open import open_source
from fleuve.data.procedural import build, rows
from fleuve.data.procedural.program import ENDS, LARGEST, LONGEST, MAPS, TESTS, source
from fleuve.errors import UserError
from fleuve.rewards.code.verify import CodeVerifier

MEANING: dict[str, Callable[[list[int], int], Any]] = {
    "add {k}": lambda x, k: list(map(k.__add__, x)),
    "times {k}": lambda x, k: list(map(k.__mul__, x)),
    "negate": lambda x, k: [0 - v for v in x],
    "square": lambda x, k: [v**2 for v in x],
    "halve": lambda x, k: [(v - v % 2) // 2 for v in x],
    "append {k}": lambda x, k: [*x, k],
    "sort": lambda x, k: sorted(x),
    "reverse": lambda x, k: list(reversed(x)),
    "mirror": lambda x, k: [*x, *reversed(x)],
    "unique": lambda x, k: [v for i, v in enumerate(x) if v not in x[:i]],
    "drop first": lambda x, k: [v for i, v in enumerate(x) if i > 0],
    "drop last": lambda x, k: [v for i, v in enumerate(x) if i < len(x) - 1],
    "first {k}": lambda x, k: [v for i, v in enumerate(x) if i < k],
    "last {k}": lambda x, k: [v for i, v in enumerate(x) if i >= len(x) - k],
    "every other": lambda x, k: [v for i, v in enumerate(x) if i % 2 == 0],
    "keep even": lambda x, k: [v for v in x if v % 2 == 0],
    "keep odd": lambda x, k: [v for v in x if v % 2 == 1],
    "keep over {k}": lambda x, k: [v for v in x if v > k],
    "keep under {k}": lambda x, k: [v for v in x if v < k],
    "sum": lambda x, k: sum(x),
    "length": lambda x, k: len(x),
    "count {k}": lambda x, k: sum(v == k for v in x),
    "maximum or 0": lambda x, k: sorted(x)[-1] if x else 0,
    "minimum or 0": lambda x, k: sorted(x)[0] if x else 0,
}
"""What the words of a step ask for, said otherwise than the generator says it."""


def take(number: int, seed: int = 0, **params: str) -> list[dict[str, Any]]:
    return list(itertools.islice(rows("program", params, seed), number))


def words(row: dict[str, Any]) -> list[str]:
    return row["prompt"].removesuffix("?").split(", ")


def asked(row: dict[str, Any], given: list[int]) -> Any:
    """What the prompt asks for, of this input."""
    value: Any = given
    for step in words(row):
        number = re.search(r"[2-9]", step)
        value = MEANING[re.sub(r"[2-9]", "{k}", step)](value, int(number[0]) if number else 0)
    return value


def taken_apart(test: str) -> tuple[list[int], Any]:
    """`assert f([1, 2]) == [2]` to its input and the output that it expects."""
    match = re.fullmatch(r"assert f\((.*)\) == (.*)", test)
    assert match is not None
    return eval(match[1]), eval(match[2])


def passes(program: str, tests: list[str]) -> bool:
    """Without a sandbox: only for programs that the generator itself has written."""
    names: dict[str, Any] = {}
    exec(program, names)
    try:
        for test in tests:
            exec(test, names)
    except Exception:
        return False
    return True


def test_every_step_has_words_of_its_own_and_the_meanings_here_cover_all() -> None:
    steps = [step.words for step in MAPS + ENDS]
    assert sorted(steps) == sorted(MEANING)


def test_tests_expect_what_the_words_ask_for() -> None:
    for row in take(1000):
        assert len(row["tests"]) == len(set(row["tests"])) == TESTS
        for given, expected in map(taken_apart, row["tests"]):
            assert len(given) <= LONGEST
            assert all(abs(v) <= LARGEST for v in given)
            assert expected == asked(row, given)


def test_every_reference_passes_its_tests() -> None:
    assert all(passes(row["answer"], row["tests"]) for row in take(1000))


def test_every_step_written_with_its_mistake_fails() -> None:
    splits = ("train", "eval")
    single = {row["prompt"]: row for split in splits for row in take(2000, max_steps="1", split=split)}
    assert {re.sub(r"[2-9]", "{k}", prompt) for prompt in single} == {step.words + "?" for step in MAPS}
    for step in MAPS:
        of_step = [row for row in single.values() if re.sub(r"[2-9]", "{k}", row["prompt"]) == step.words + "?"]
        for row in of_step:
            number = re.search(r"[2-9]", row["prompt"])
            mistake = step.mistake.replace("{k}", number[0] if number else "")
            assert not passes(source([mistake]), row["tests"])


def test_a_program_that_leaves_a_step_out_is_found_where_it_differs() -> None:
    rng = random.Random(1)
    inputs = [[rng.randint(-LARGEST, LARGEST) for _ in range(rng.randint(0, LONGEST))] for _ in range(200)]
    found = differ = 0
    for row in take(300):
        lines = row["answer"].split("\n")
        for left_out in range(1, len(lines) - 1):
            shorter = "\n".join(lines[:left_out] + lines[left_out + 1 :])
            if not passes(shorter, [f"assert f({given!r}) == {asked(row, given)!r}" for given in inputs]):
                differ += 1
                found += not passes(shorter, row["tests"])
    assert differ > 300
    assert found >= 0.97 * differ


def test_the_sandbox_is_of_the_same_mind(verifier: CodeVerifier) -> None:
    scores = set()
    for row in take(25, slip="0.4", forget="0.3"):
        assert verifier(row["answer"], row) == 1.0
        scores.add(score := verifier(row["completion"], row))
        assert score == passes(row["completion"], row["tests"])
    assert scores == {0.0, 1.0}


def test_a_prompt_shows_nothing_of_its_tests() -> None:
    tests: dict[str, list[list[str]]] = {}
    for row in take(2000, max_steps="2"):
        assert re.fullmatch(r"[a-z0-9, ]+\?", row["prompt"])
        tests.setdefault(row["prompt"], []).append(row["tests"])
    met_again = [drawn for drawn in tests.values() if len(drawn) > 1]
    assert len(met_again) > 100
    assert all(drawn[0] != drawn[1] for drawn in met_again), "the same problem is tested on other inputs the next time"


def test_problems_have_one_to_four_steps_each_number_as_often() -> None:
    counts = [len(words(row)) for row in take(4000, seed=1)]
    for number in (1, 2, 3, 4):
        assert counts.count(number) / len(counts) == pytest.approx(0.25, abs=0.04)


def test_careless_demonstrations_come_as_often_as_asked_and_leave_answer_and_tests_right() -> None:
    slipped = take(2000, slip="0.3")
    lines = [pair for row in slipped for pair in zip(lines_of(row["completion"]), lines_of(row["answer"]), strict=True)]
    assert sum(written != right for written, right in lines) / len(lines) == pytest.approx(0.3, abs=0.03)
    several = [row for row in take(2000, forget="0.2") if len(words(row)) > 1]
    shorter = [row for row in several if len(lines_of(row["completion"])) == len(lines_of(row["answer"])) - 1]
    assert len(shorter) / len(several) == pytest.approx(0.2, abs=0.03)
    assert all(row["completion"] == row["answer"] for row in take(200))
    assert all(passes(row["answer"], row["tests"]) for row in slipped[:300] + shorter)


def lines_of(program: str) -> list[str]:
    """A line a step."""
    return program.split("\n")[1:-1]


def test_a_restored_source_goes_on_with_the_same_problems_and_tests() -> None:
    def source_of_prompts() -> Any:
        return open_source("procedural:program", DataSettings(train="", verifier="code"), _letters, seed=3)

    whole, resumed = source_of_prompts(), source_of_prompts()
    first = [whole.next() for _ in range(20)]
    state = whole.state()
    expected = [whole.next() for _ in range(20)]
    resumed.restore(state)
    assert [resumed.next() for _ in range(20)] == expected
    assert resumed.prompt(first[7].id) == first[7]
    assert all(prompt.verifier == "code" and len(prompt.row["tests"]) == TESTS for prompt in expected)


def _letters(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
    return {"input_ids": [ord(c) for c in text]}


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_steps": "0"}, "max_steps=0 is not in 1..19"),
        ({"slip": "1.5"}, "are probabilities"),
        ({"splip": "0.5"}, "did you mean 'slip'"),
    ],
)
def test_a_mistake_in_a_parameter_is_told(params: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        build("program", params)
