"""What is said of a trainer of several ranks before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fleuve.config.rank_checks import heads_problem, rank_notes
from fleuve.config.settings import Settings, SftSettings


def _settings(**sections: dict[str, Any]) -> Settings:
    return Settings.model_validate(
        {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "d"}, **{"trainer": {"device": "cpu"}, **sections}}
    )


def test_one_rank_needs_no_note() -> None:
    assert rank_notes(_settings(), cores=1) == []


def test_more_ranks_than_cores_are_noted_in_one_line() -> None:
    (note,) = rank_notes(_settings(trainer={"ranks": 4, "device": "cpu"}), cores=2)
    assert note.startswith("trainer.ranks = 4: this machine has 2 cores")
    assert rank_notes(_settings(trainer={"ranks": 4, "device": "cpu"}), cores=4) == []


def test_more_ranks_than_answers_are_noted() -> None:
    sections: dict[str, Any] = {"control": {"batch_size": 2}, "rollout": {"group_size": 2}}
    (note,) = rank_notes(_settings(trainer={"ranks": 4, "device": "cpu"}, **sections), cores=8)
    assert "a minibatch has 2 answers" in note
    together: dict[str, Any] = {"ranks": 4, "tensor_parallel": 2, "device": "cpu"}  # two micro-batches at a time
    assert rank_notes(_settings(trainer=together, **sections), cores=8) == []


def test_offload_without_a_gpu_has_no_part() -> None:
    (note,) = rank_notes(_settings(trainer={"offload": True, "device": "cpu"}), cores=8)
    assert note.startswith("trainer.offload has no part")


@pytest.mark.parametrize("trainer", [{"ranks": 2}, {"offload": True}])
def test_a_critic_has_one_rank(trainer: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="a critic's weights are not shared out"):
        _settings(trainer=trainer, algorithm={"preset": "ppo"})


def test_supervised_training_has_one_rank() -> None:
    with pytest.raises(ValidationError, match="fleuve sft trains with one rank"):
        SftSettings.model_validate(
            {"run_dir": "r", "model": {"path": "m", "save": "s"}, "data": {"train": "d"}, "trainer": {"ranks": 2}}
        )


def test_a_context_is_a_divisor_of_the_ranks_and_of_the_models_heads(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"trainer\.ranks = 4 is not divisible by trainer\.context_parallel = 3"):
        _settings(trainer={"ranks": 4, "context_parallel": 3})
    (tmp_path / "config.json").write_text('{"num_attention_heads": 9}')
    assert heads_problem(_settings(trainer={"ranks": 3, "context_parallel": 3}), tmp_path) is None
    problem = heads_problem(_settings(trainer={"ranks": 4, "context_parallel": 2}), tmp_path)
    assert problem is not None
    assert "the model has 9 attention heads" in problem


def test_a_tensor_group_divides_the_ranks_and_both_kinds_of_heads(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"trainer\.ranks = 4 is not divisible by .* = 2 × 3"):
        _settings(trainer={"ranks": 4, "context_parallel": 2, "tensor_parallel": 3})
    (tmp_path / "config.json").write_text('{"num_attention_heads": 12, "num_key_value_heads": 2}')
    assert heads_problem(_settings(trainer={"ranks": 4, "tensor_parallel": 2}), tmp_path) is None
    problem = heads_problem(_settings(trainer={"ranks": 4, "tensor_parallel": 4}), tmp_path)
    assert problem is not None
    assert "12 attention heads and 2 key-value heads, which that does not divide; give it a divisor of 2" in problem
    both = heads_problem(_settings(trainer={"ranks": 8, "context_parallel": 4, "tensor_parallel": 2}), tmp_path)
    assert both is not None
    assert "the model has 6 attention heads for each part of trainer.tensor_parallel" in both
