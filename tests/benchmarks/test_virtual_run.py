"""The run behind `benchmarks/staleness.py`: everything real but the processes and the clock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fleuve.config.settings import Settings

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import _virtual_run  # noqa: E402
from staleness import between_markers  # noqa: E402


def settings(**control: Any) -> Settings:
    return Settings.model_validate(
        {
            "run_dir": "unused",
            "steps": 3,
            "model": {"path": "builtin:small"},
            "data": {"train": "procedural:chain", "eval": "procedural:chain"},
            "rollout": {"group_size": 4, "max_new_tokens": 96, "max_running": 16},
            "control": {"batch_size": 4, "max_staleness": 2, **control},
            "trainer": {"minibatches": 2, "token_budget": 2048, "learning_rate": 1e-3},
        }
    )


def tiny_run(**control: Any) -> _virtual_run.VirtualResult:
    return _virtual_run.run(settings(**control), evaluated=[2], problems=8, samples=2)


@pytest.fixture(scope="module")
def result() -> _virtual_run.VirtualResult:
    return tiny_run()


def what_was_learnt(result: _virtual_run.VirtualResult) -> list[dict[str, float]]:
    """Metrics without those that the trainer reads off a real clock; the controller's times are virtual."""
    virtual = ("time/step", "time/wait_for_batch", "time/publish", "time/weight_sync")
    return [
        {k: v for k, v in m.items() if v == v and (not k.startswith("time/") or k in virtual)}
        for m in result.steps.metrics
    ]


def test_the_same_settings_give_the_same_run_to_the_last_bit(result: _virtual_run.VirtualResult) -> None:
    again = tiny_run()
    assert what_was_learnt(again) == what_was_learnt(result)
    assert again.evaluations == result.evaluations
    assert again.virtual_seconds == result.virtual_seconds
    assert sorted(again.evaluations) == [2, 3]


def test_staleness_comes_near_its_bound_and_never_passes_it(result: _virtual_run.VirtualResult) -> None:
    mean, largest = result.steps.realised()
    assert largest == 2
    assert mean > 1.3


def test_synchronous_is_not_stale_at_all() -> None:
    assert tiny_run(max_staleness=0).steps.realised() == (0.0, 0)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("a7+8=15;b15-3=12#12", "12", True),
        ("#012", "12", True),
        ("#12", "-12", False),
        ("a7+8=15#", "15", True),  # the last number, where there is no answer
        ("#7+5", "12", False),  # a sum is not worked out
        ("#__import__('os')", "12", False),
        ("", "12", False),
    ],
)
def test_answers_are_compared_as_written_or_as_numbers(text: str, answer: str, right: bool) -> None:
    assert _virtual_run.strictly_equal(text, answer) is right


def test_a_table_is_replaced_between_its_markers_and_appended_where_there_are_none() -> None:
    once = between_markers("# Title\n", "a\n")
    assert once.startswith("# Title\n\n<!--")
    twice = between_markers(once + "\nmore\n", "b\n")
    assert twice == once.replace("\na\n", "\nb\n") + "\nmore\n"
