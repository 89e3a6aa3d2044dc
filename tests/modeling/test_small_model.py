"""`builtin:small`: ships with the package, comes from the recipe, and is mediocre on purpose."""

import itertools
import tomllib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fleuve.data.procedural import rows
from fleuve.modeling.char_tokenizer import SPECIAL
from fleuve.modeling.loading import resolve_model
from fleuve.modeling.tokenizer import load_tokenizer
from fleuve.rewards.math import verify_math

SMALL = "builtin:small"
RECIPE = Path(__file__).parents[2] / "examples" / "sft_small.toml"
PROBLEMS = 256


def sample_answers(prompts: list[str], max_new_tokens: int = 256) -> list[str]:
    """One answer to each at temperature 1, by transformers' own generation."""
    tokenizer = load_tokenizer(SMALL)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(resolve_model(SMALL)).float().eval()
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


def test_it_is_small() -> None:
    files = [f for f in Path(resolve_model(SMALL)).iterdir() if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 8_000_000


def test_it_has_the_architecture_and_the_alphabet_of_its_recipe() -> None:
    recipe = tomllib.loads(RECIPE.read_text())["model"]
    config = AutoModelForCausalLM.from_pretrained(resolve_model(SMALL)).config.to_dict()
    assert {key: config[key] for key in recipe["config"]} == recipe["config"]
    vocabulary = load_tokenizer(SMALL).get_vocab()
    assert sorted(vocabulary, key=vocabulary.__getitem__) == [*SPECIAL, *recipe["alphabet"]]


def test_it_solves_some_problems_and_leaves_reinforcement_something_to_find_out() -> None:
    problems = list(itertools.islice(rows("chain", {"split": "eval"}, 0), PROBLEMS))
    answers = sample_answers([p["prompt"] for p in problems])
    verdicts = [verify_math(a, p["answer"]) == 1.0 for a, p in zip(answers, problems, strict=True)]
    assert 0.2 <= sum(verdicts) / PROBLEMS <= 0.55
    worked_out = [a.count("=") == p["prompt"].count(";") for a, p in zip(answers, problems, strict=True)]
    right_if_worked_out = sum(v for v, w in zip(verdicts, worked_out, strict=True) if w) / sum(worked_out)
    assert right_if_worked_out >= 0.7, "the skill is there"
    assert sum(worked_out) / PROBLEMS < 0.6, "it is not used most of the time"
