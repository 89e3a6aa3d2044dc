"""`builtin:small` and `builtin:small-code`: ship with the package, come from their recipes, mediocre on purpose."""

import itertools
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fleuve.data.procedural import rows
from fleuve.modeling.char_tokenizer import SPECIAL
from fleuve.modeling.loading import resolve_model
from fleuve.modeling.tokenizer import load_tokenizer
from fleuve.rewards.math import verify_math

SMALL, SMALL_CODE = "builtin:small", "builtin:small-code"
EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = {SMALL: EXAMPLES / "sft_small.toml", SMALL_CODE: EXAMPLES / "sft_code.toml"}
PROBLEMS = 128


def sample_answers(name: str, prompts: list[str], max_new_tokens: int = 256) -> list[str]:
    """One answer to each at temperature 1, by transformers' own generation."""
    tokenizer = load_tokenizer(name)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(resolve_model(name)).float().eval()
    torch.manual_seed(0)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    outputs = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    answers: list[str] = tokenizer.batch_decode(outputs[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return answers


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_small(name: str) -> None:
    files = [f for f in Path(resolve_model(name)).iterdir() if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 8_000_000


@pytest.mark.parametrize("name", RECIPES)
def test_it_has_the_architecture_and_the_alphabet_of_its_recipe(name: str) -> None:
    recipe = tomllib.loads(RECIPES[name].read_text())["model"]
    config = AutoModelForCausalLM.from_pretrained(resolve_model(name)).config.to_dict()
    assert {key: config[key] for key in recipe["config"]} == recipe["config"]
    vocabulary = load_tokenizer(name).get_vocab()
    assert sorted(vocabulary, key=vocabulary.__getitem__) == [*SPECIAL, *recipe["alphabet"]]


@pytest.mark.slow
def test_it_solves_some_problems_and_leaves_reinforcement_something_to_find_out() -> None:
    problems = list(itertools.islice(rows("chain", {"split": "eval"}, 0), PROBLEMS))
    answers = sample_answers(SMALL, [p["prompt"] for p in problems])
    verdicts = [verify_math(a, p["answer"]) == 1.0 for a, p in zip(answers, problems, strict=True)]
    assert 0.2 <= sum(verdicts) / PROBLEMS <= 0.55
    worked_out = [a.count("=") == p["prompt"].count(";") for a, p in zip(answers, problems, strict=True)]
    right_if_worked_out = sum(v for v, w in zip(verdicts, worked_out, strict=True) if w) / sum(worked_out)
    assert right_if_worked_out >= 0.7, "the skill is there"
    assert sum(worked_out) / PROBLEMS < 0.6, "it is not used most of the time"


def test_the_small_programmer_knows_the_right_lines_and_the_mistakes() -> None:
    problems = list(itertools.islice(rows("program", {"split": "eval"}, 0), PROBLEMS))
    answers = sample_answers(SMALL_CODE, [p["prompt"] for p in problems], max_new_tokens=160)
    right = [a == p["answer"] for a, p in zip(answers, problems, strict=True)]
    assert 0.2 <= sum(right) / PROBLEMS <= 0.5
    lines = [line for answer in answers for line in answer.split("\n")]
    for good, bad in ((" x=sorted(x)", " x=x.sort()"), (" x=[v*v for v in x]", " x=[v^2 for v in x]")):
        assert lines.count(good) > lines.count(bad) > 0
