"""Several rewards in one, and what a row names."""

from pathlib import Path

import pytest

from fleuve.config.settings import DataSettings, RewardSettings
from fleuve.data.open import open_source, read_rows
from fleuve.errors import UserError
from fleuve.rewards.find import check_verifier
from fleuve.rewards.pool import RewardPool
from fleuve.rewards.verifiers import run
from fleuve.rewards.weighted import names, terms
from fleuve.types import Prompt


class Tokenizer:
    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


@pytest.mark.parametrize(
    ("verifier", "parts"),
    [
        ("math", [(1.0, "math")]),
        ("math + 0.1*a.b:f", [(1.0, "math"), (0.1, "a.b:f")]),
        ("2*math-.5 * exact", [(2.0, "math"), (-0.5, "exact")]),
        ("0.5*`a+b*c-d` + exact", [(0.5, "`a+b*c-d`"), (1.0, "exact")]),
    ],
)
def test_a_sum_is_read_into_weights_and_names(verifier: str, parts: list[tuple[float, str]]) -> None:
    assert list(terms(verifier)) == parts


@pytest.mark.parametrize(
    "verifier", ["", "math +", "+ math", "math exact", "0.1*", "math * 0.1", "`a", "math + + exact"]
)
def test_what_is_no_sum_is_one_clear_line(verifier: str) -> None:
    with pytest.raises(UserError, match=r"^data.verifier = .*$"):
        terms(verifier)


@pytest.mark.parametrize(
    ("verifier", "message"), [("math + 0.1*exat", "did you mean 'exact'"), ("`(`", "is no regular")]
)
def test_every_part_is_checked_before_anything_starts(verifier: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_verifier(verifier)


def test_scores_are_weighted_and_added() -> None:
    assert run("2*exact - 0.5*`\\d+`", "5", "5", {}) == (1.5, "")
    assert run("2*exact - 0.5*`\\d+`", "x", "5", {}) == (0.0, "")


def test_a_form_is_that_of_the_whole_answer() -> None:
    form = "`<think>.+</think>.+`"
    assert run(form, " <think>two\nlines</think> 5\n", "", {}) == (1.0, "")
    assert run(form, "well, <think>two</think> 5", "", {}) == (0.0, "")


def test_a_sum_without_one_of_its_parts_is_no_verdict() -> None:
    score, reason = run("exact + 0.1*no_such_module:f", "5", "5", {})
    assert score is None
    assert "no_such_module" in reason


async def test_the_parts_of_a_sum_are_loaded_at_the_start() -> None:
    assert names(["math + exact", "exact"]) == ("math", "exact")
    with pytest.raises(UserError, match="no_such_module"):
        async with RewardPool(RewardSettings(), ["exact + 0.1*no_such_module:f"]):
            pass


def write(tmp_path: Path, *rows: str) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows))
    return str(path)


def test_a_row_names_its_verifier(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "p", "answer": "a"}',
        '{"prompt": "p", "answer": "a", "verifier": "exact + 0.1*`a`"}',
    )
    data = DataSettings(train=path, shuffle=False)
    source = open_source(path, data, Tokenizer(), seed=0)
    assert source.verifiers == ("math", "exact + 0.1*`a`")
    assert [source.next().verifier for _ in range(3)] == ["math", "exact + 0.1*`a`", "math"]


@pytest.mark.parametrize(("named", "message"), [('"exat"', "did you mean 'exact'"), ("3", "is no text")])
def test_a_row_that_names_none_is_told_with_its_line(tmp_path: Path, named: str, message: str) -> None:
    path = write(tmp_path, '{"prompt": "p", "answer": "a"}', f'{{"prompt": "p", "answer": "a", "verifier": {named}}}')
    with pytest.raises(UserError, match=rf'rows.jsonl:2: field "verifier".*{message}'):
        list(read_rows(path, DataSettings(train=path)))


async def test_the_pool_scores_by_a_sum() -> None:
    prompt = Prompt(id="e0/0", input_ids=[1], text="?", answer="5", verifier="exact + 0.25*`\\d`")
    async with RewardPool(RewardSettings(), [prompt.verifier]) as rewards:
        assert (await rewards.score(prompt, "5")).score == 1.25
        assert (await rewards.score(prompt, "7")).score == 0.25
