"""The supervised start: what it learns, what it saves, what it refuses."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import ALPHABET, SMALL
from transformers import AutoModelForCausalLM, AutoTokenizer

from fleuve.config.settings import SftSettings
from fleuve.contracts import RunError
from fleuve.errors import UserError
from fleuve.modeling.char_tokenizer import build_char_tokenizer
from fleuve.observe.rundir import RunDirectory
from fleuve.train.sft import SftRow, run_sft, schedule

ARCHITECTURE = {"model_type": "qwen3", **{k: v for k, v in SMALL.items() if not k.endswith(("_id", "vocab_size"))}}
TOKENIZER = build_char_tokenizer(ALPHABET)


def _settings(tmp_path: Path, steps: int = 60, **trainer: object) -> SftSettings:
    return SftSettings.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "steps": steps,
            "batch_size": 16,
            "model": {"config": ARCHITECTURE, "alphabet": ALPHABET, "save": str(tmp_path / "model")},
            "data": {"train": "unused"},
            "trainer": {"minibatches": 1, "learning_rate": 1e-2, "warmup_steps": 5, "token_budget": 200, **trainer},
        }
    )


def _rows() -> Iterator[SftRow]:
    """The letter doubled: `a?` → `aa`."""
    for letter in itertools.cycle("abcdefgh"):
        yield SftRow(TOKENIZER.encode(letter + "?"), TOKENIZER.encode(letter * 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_completions_and_where_they_end(tmp_path: Path, dtype: str) -> None:
    log: list[dict[str, float]] = []
    path = run_sft(_settings(tmp_path, dtype=dtype), _rows(), log.append)
    assert path == tmp_path / "model"
    assert log[0]["loss/cross_entropy"] > 2.5
    assert log[-1]["loss/cross_entropy"] < 0.1
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    output = model.generate(torch.tensor([tokenizer.encode("f?")]), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(output[0]) == "f?ff<eos>"


def test_the_prompt_is_not_learnt(tmp_path: Path) -> None:
    """Completions are constant, prompts random: the loss goes to nothing though prompts cannot be foreseen."""
    rows = (SftRow([3 + (i * 7) % 20, 3 + (i * i) % 20], [5]) for i in itertools.count())
    log: list[dict[str, float]] = []
    run_sft(_settings(tmp_path, steps=30), rows, log.append)
    assert log[-1]["loss/cross_entropy"] < 0.05


def test_the_same_settings_and_rows_make_the_same_model(tmp_path: Path) -> None:
    paths = [run_sft(_settings(tmp_path / name, steps=3), _rows(), lambda _: None) for name in "ab"]
    a, b = ((p / "model.safetensors").read_bytes() for p in paths)
    assert a == b


def test_it_starts_from_a_model_directory(tmp_path: Path) -> None:
    first = run_sft(_settings(tmp_path, steps=40), _rows(), lambda _: None)
    settings = _settings(tmp_path / "second", steps=2, learning_rate=1e-6)
    again = settings.model_copy(
        update={"model": type(settings.model)(path=str(first), save=str(tmp_path / "second" / "model"))}
    )
    log: list[dict[str, float]] = []
    path = run_sft(again, _rows(), log.append)
    assert log[0]["loss/cross_entropy"] < 0.5
    assert AutoTokenizer.from_pretrained(path).encode("f?") == TOKENIZER.encode("f?")


def test_the_learning_rate_rises_on_a_line_and_falls_on_a_cosine() -> None:
    rates = [schedule(step, steps=100, warmup=10) for step in range(100)]
    assert rates[:11] == pytest.approx([0.1 * i for i in range(1, 11)] + [1.0])
    assert rates[55] == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001


def test_metrics_are_finite_and_complete(tmp_path: Path) -> None:
    log: list[dict[str, float]] = []
    run_sft(_settings(tmp_path, steps=2), _rows(), log.append)
    assert [m["step"] for m in log] == [1.0, 2.0]
    assert log[0]["tokens/trained"] == 16 * 5
    assert all(math.isfinite(v) for m in log for v in m.values())


def test_too_few_rows_say_how_many_are_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ended in step 2: 5 steps of 16 need 80"):
        run_sft(_settings(tmp_path, steps=5), itertools.islice(_rows(), 20), lambda _: None)


def test_a_row_over_the_token_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 204 tokens; trainer\.token_budget = 200 is too small"):
        run_sft(_settings(tmp_path), iter([SftRow([3, 3, 3], [4] * 200)] * 16), lambda _: None)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    wrong = settings.model_copy(
        update={"model": settings.model.model_copy(update={"config": {"model_type": "qwen33"}})}
    )
    with pytest.raises(UserError, match="qwen33"):
        run_sft(wrong, _rows(), lambda _: None)


def test_it_does_not_overwrite_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "diary.txt").write_text("dear diary")
    with pytest.raises(UserError, match="is no model directory"):
        run_sft(_settings(tmp_path, steps=1), _rows(), lambda _: None)
    assert (tmp_path / "model" / "diary.txt").exists()


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    settings = _settings(tmp_path, steps=1)
    first = RunDirectory(settings.run_dir)
    first.root.mkdir()
    first.lock()
    with pytest.raises(UserError, match=r"a run is going on in .*run \(process \d+\)"):
        run_sft(settings, _rows())
    first.release()
    run_sft(settings, _rows())
    run_sft(settings, _rows())  # it has given the directory up


def test_updates_that_are_not_finite_end_it_when_there_are_three_in_a_row(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    with pytest.raises(RunError, match="3 updates in a row had a loss or a gradient that is not finite"):
        run_sft(_settings(tmp_path, learning_rate=1e30, eps=1e-30, max_grad_norm=1e30), _rows(), seen.append)
    assert [row["loss/skipped_nonfinite"] for row in seen[-3:]] == [1.0, 1.0, 1.0]
