"""Procedural problems: right, reproducible, heavy-tailed, and never shared between training and evaluation."""

import itertools
import re
import statistics

import pytest

from fleuve.data.procedural import EVAL_SHARE, rows
from fleuve.data.procedural.numeral import in_words
from fleuve.errors import UserError
from fleuve.rewards.math import verify_math

MANY = 3000


def take(number: int, name: str = "chain", seed: int = 0, **params: str) -> list[dict[str, str]]:
    return list(itertools.islice(rows(name, params, seed), number))


def solve_chain(prompt: str) -> int:
    """What a chain comes to, from its prompt alone."""
    start, *steps = prompt.removesuffix("?").split(";")
    value = int(start)
    for step in steps:
        value = eval(f"({value}){step[1:]}")
    return value


def number_of_steps(prompt: str) -> int:
    return prompt.count(";")


def test_the_same_seed_gives_the_same_rows_and_another_seed_others() -> None:
    for name in ("chain", "numeral", "program"):
        assert take(200, name, seed=3) == take(200, name, seed=3)
        assert take(200, name, seed=3) != take(200, name, seed=4)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_answer_of_a_chain_is_what_its_operations_come_to(split: str) -> None:
    for row in take(500, split=split):
        assert row["answer"] == str(solve_chain(row["prompt"]))


def test_every_line_of_a_careful_demonstration_is_true_and_the_last_is_the_answer() -> None:
    for row in take(500):
        working, _, answer = row["completion"].rpartition("#")
        lines = working.split(";")
        assert len(lines) == number_of_steps(row["prompt"])
        for line in lines:
            asked, _, given = line[1:].partition("=")
            assert eval(asked) == int(given)
            assert 0 <= int(given) <= 99
        assert answer == row["answer"] == lines[-1].partition("=")[2]
        assert verify_math(row["completion"], row["answer"]) == 1.0


def test_steps_are_named_once_each_round_the_alphabet() -> None:
    for row in take(500, max_steps="26", median="20"):
        names = re.findall("[a-z]", row["prompt"])
        assert len(set(names)) == len(names)
        assert all((ord(b) - ord(a)) % 26 == 1 for a, b in itertools.pairwise(names))


def test_lengths_vary_by_twenty_times_and_are_heavy_tailed() -> None:
    lengths = sorted(len(row["completion"]) for row in take(MANY))
    assert lengths[-1] / lengths[0] >= 20
    assert statistics.mean(lengths) > 1.2 * statistics.median(lengths)
    assert sum(lengths[-MANY // 10 :]) > 0.25 * sum(lengths), "the longest tenth holds a quarter of the tokens"


@pytest.mark.parametrize("name", ["chain", "numeral", "program"])
def test_train_and_eval_share_no_prompt_whatever_the_seed(name: str) -> None:
    train = {row["prompt"] for row in take(MANY, name, seed=0)}
    evaluated = {row["prompt"] for seed in (0, 1) for row in take(MANY // EVAL_SHARE, name, seed=seed, split="eval")}
    assert not train & evaluated


def test_careless_demonstrations_come_as_often_as_asked_and_leave_the_answer_right() -> None:
    demonstrations = take(MANY, guess="0.3", stop="0.2")
    guesses = [row for row in demonstrations if row["completion"].startswith("#")]
    unfinished = [
        row
        for row in demonstrations
        if row not in guesses and row["completion"].count("=") < number_of_steps(row["prompt"])
    ]
    longer_than_one_step = sum(number_of_steps(row["prompt"]) > 1 for row in demonstrations) / MANY
    assert len(guesses) / MANY == pytest.approx(0.3, abs=0.03)
    assert len(unfinished) / MANY == pytest.approx(0.2 * longer_than_one_step, abs=0.03)
    assert all(abs(int(row["completion"][1:]) - int(row["answer"])) <= 10 for row in guesses)
    assert all(row["answer"] == str(solve_chain(row["prompt"])) for row in demonstrations)
    for row in unfinished:
        working, _, reached = row["completion"].rpartition("#")
        assert working.rpartition("=")[2] == reached


def test_numbers_in_words_are_the_numbers() -> None:
    words = {number: in_words(number) for number in range(1000)}
    assert len(set(words.values())) == 1000
    for number, expected in {
        0: "zero",
        8: "eight",
        10: "ten",
        13: "thirteen",
        20: "twenty",
        47: "forty-seven",
        100: "one hundred",
        309: "three hundred and nine",
        999: "nine hundred and ninety-nine",
    }.items():
        assert words[number] == expected
    for row in take(200, "numeral", lowest="5", highest="250"):
        number = int(row["answer"])
        assert 5 <= number <= 250
        assert row["prompt"] == f"Write the number {words[number]} in digits."
        assert verify_math(row["completion"], row["answer"]) == 1.0


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("chian", {}, "did you mean 'chain'"),
        ("chain", {"medain": "3"}, "did you mean 'median'"),
        ("chain", {"spilt": "eval"}, "did you mean 'split'"),
        ("chain", {"split": "test"}, "neither train nor eval"),
        ("chain", {"median": "many"}, "median=many is not of type float"),
        ("chain", {"max_steps": "27"}, "max_steps=27 is not in 1..26"),
        ("chain", {"guess": "0.7", "stop": "0.7"}, "together at most 1"),
        ("numeral", {"lowest": "5", "highest": "1000"}, "is not within 0..999"),
    ],
)
def test_a_mistake_is_told_at_once_in_one_line(name: str, params: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        rows(name, params, 0)
    assert "\n" not in str(caught.value)
