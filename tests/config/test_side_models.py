"""The reference and the critic's backbone are looked at as the policy's model is, where they are used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checked import Make, notes, problems

from fleuve.config.preflight import preflight

REFERENCE = "algorithm.reference"
CRITIC = "critic.path"


def using(key: str, path: Path | str) -> dict[str, Any]:
    """Settings in which this model is used."""
    if key == REFERENCE:
        return {"algorithm": {"kl_coefficient": 0.01, "reference": str(path)}}
    return {"algorithm": {"preset": "ppo"}, "critic": {"path": str(path)}}


@pytest.fixture
def other(model: Path) -> Path:
    """A second model directory with the same tokenizer."""
    return Path(shutil.copytree(model, model.with_name("other")))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=1))


both = pytest.mark.parametrize("key", [REFERENCE, CRITIC])


@both
def test_a_sound_one_passes(make: Make, other: Path, key: str) -> None:
    assert notes(make(**using(key, other))) == []


@both
def test_one_that_is_missing_or_not_whole_is_found_under_its_own_setting(make: Make, other: Path, key: str) -> None:
    assert problems(make(**using(key, other.with_name("othr")))) == [
        f"{key} = othr: no such directory; did you mean other?"
    ]
    (other / "model.safetensors").unlink()
    (line,) = problems(make(**using(key, other)))
    assert line.startswith(f"{key} = other: no weights in it")


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"reference": "models/nowhere"}},
        {"critic": {"path": "models/nowhere"}},
        {"algorithm": {"preset": "ppo"}, "critic": {"path": "models/nowhere", "backbone": "shared"}},
    ],
)
def test_one_that_is_not_used_is_not_looked_for(make: Make, sections: dict[str, Any]) -> None:
    (line,) = notes(make(**sections))
    assert " = models/nowhere has no part: " in line


@both
def test_a_token_with_another_number_is_an_error(make: Make, other: Path, key: str) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["5"], vocabulary["7"] = vocabulary["7"], vocabulary["5"]

    rewrite(other / "tokenizer.json", swap)
    assert problems(make(**using(key, other))) == [
        f"{key} = other: its tokenizer is not the policy's, whose tokens it is given: "
        "token '5' is 5 in tiny/tokenizer.json, and 7 in other/tokenizer.json"
    ]


def test_a_token_that_it_does_not_know_is_an_error(make: Make, other: Path) -> None:
    rewrite(other / "tokenizer.json", lambda content: content["model"]["vocab"].pop("7"))
    (line,) = problems(make(**using(REFERENCE, other)))
    assert line.endswith("token '7' is 7 in tiny/tokenizer.json, and unknown in other/tokenizer.json")


def test_a_special_token_counts_too(make: Make, model: Path, other: Path) -> None:
    for directory, number in ((model, 100), (other, 101)):
        rewrite(
            directory / "tokenizer.json",
            lambda content, number=number: content["added_tokens"].append(
                {"id": number, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False}
                | {"normalized": False, "special": True}
            ),
        )
    (line,) = problems(make(**using(REFERENCE, other)))
    assert line.endswith("token '<end>' is 100 in tiny/tokenizer.json, and 101 in other/tokenizer.json")


def test_the_same_tokens_in_another_file_or_with_more_of_them_are_the_same(make: Make, other: Path) -> None:
    rewrite(other / "tokenizer.json", lambda content: content["model"]["vocab"].update({"beyond": 100}))
    preflight(make(**using(REFERENCE, other)))


def test_a_vocabulary_that_is_a_list_is_numbered_in_order(make: Make, model: Path, other: Path) -> None:
    def unigram(content: dict[str, Any]) -> None:
        tokens = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
        content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[token, -1.0] for token, _ in tokens]}

    rewrite(other / "tokenizer.json", unigram)
    preflight(make(**using(REFERENCE, other)))


@pytest.mark.parametrize("text", ["{}", "nothing", '{"model": {"vocab": [1]}}', "[]"])
def test_a_tokenizer_that_cannot_be_read_is_an_error(make: Make, other: Path, text: str) -> None:
    (other / "tokenizer.json").write_text(text)
    (line,) = problems(make(**using(REFERENCE, other)))
    assert line.startswith("other/tokenizer.json: cannot be read as a tokenizer: ")


def test_a_context_too_short_for_the_longest_sequence_is_found(make: Make, other: Path) -> None:
    rewrite(other / "config.json", lambda content: content.update(max_position_embeddings=69))
    assert problems(make(**using(REFERENCE, other))) == [
        "algorithm.reference = other: its context is 69, the longest sequence has 70 tokens"
    ]
    rewrite(other / "config.json", lambda content: content.update(max_position_embeddings=70))
    preflight(make(**using(REFERENCE, other)))
