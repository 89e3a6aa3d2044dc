"""How long simulated answers are."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from cluster import cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from fleuve.errors import UserError
from fleuve.simulate.lengths import Lognormal, Measured, open_lengths, read_lengths


def drawn(lengths: Lognormal | Measured, groups: int = 400, samples: int = 8) -> list[list[int]]:
    return [[lengths.draw(f"p{g}", s) for s in range(samples)] for g in range(groups)]


def flat(groups: list[list[int]]) -> list[int]:
    return [length for group in groups for length in group]


@settings(max_examples=25)
@given(mean=st.floats(50, 6000), sigma=st.floats(0.1, 1.5))
def test_the_mean_is_that_of_the_answers_as_they_come_with_the_cut_off(mean: float, sigma: float) -> None:
    lengths = flat(drawn(Lognormal(mean, sigma, longest=8192, prompt_share=0.0), groups=2000, samples=1))
    assert all(1 <= length <= 8192 for length in lengths)
    error = statistics.stdev(lengths) / len(lengths) ** 0.5
    assert abs(statistics.fmean(lengths) - mean) < 5 * error + 1


def test_the_same_seed_prompt_and_sample_have_the_same_length() -> None:
    first, again, other = (Lognormal(500, 0.8, 4000, seed=seed) for seed in (1, 1, 2))
    assert drawn(first) == drawn(again) != drawn(other)


def test_answers_of_one_prompt_are_alike_as_far_as_the_prompt_decides() -> None:
    same = drawn(Lognormal(500, 0.8, 4000, prompt_share=1.0))
    assert all(len(set(group)) == 1 for group in same)

    def share(prompt_share: float) -> float:
        """Of the variance between the groups' means: 1/samples of it would be chance."""
        groups = drawn(Lognormal(500, 0.5, 10**6, prompt_share=prompt_share))
        means = [statistics.fmean(group) for group in groups]
        return statistics.variance(means) / statistics.variance(flat(groups))

    assert share(0.0) < 0.2 < share(0.5) < 0.8


def test_measured_lengths_come_as_often_as_they_were_seen() -> None:
    lengths = flat(drawn(Measured([10, 10, 10, 90], longest=50, prompt_share=0.0), groups=2000, samples=1))
    assert set(lengths) == {10, 50}  # cut off at the longest answer
    assert lengths.count(10) / len(lengths) == pytest.approx(0.75, abs=0.04)


def test_lengths_are_read_from_a_file_or_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("12\n\n7\n")
    assert read_lengths(tmp_path / "lengths.txt") == [12, 7]
    (tmp_path / "rollouts").mkdir()
    group = {"trajectories": [{"output_ids": [1, 2, 3]}, {"output_ids": []}]}
    (tmp_path / "rollouts" / "step-000001.jsonl").write_text(json.dumps(group) + "\n")
    assert read_lengths(tmp_path) == [3, 1]


@pytest.mark.parametrize(
    ("content", "complaint"), [("12\nx7\n", "line 2: 'x7' is no length"), ("0\n", "line 1"), ("", "no lengths in it")]
)
def test_a_file_that_holds_no_lengths_is_one_line(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "lengths.txt").write_text(content)
    with pytest.raises(UserError, match=complaint) as error:
        read_lengths(tmp_path / "lengths.txt")
    assert "\n" not in str(error.value)


def test_a_directory_without_answers_and_a_missing_file_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no rollouts/\*.jsonl in it"):
        read_lengths(tmp_path)
    with pytest.raises(UserError, match="No such file"):
        read_lengths(tmp_path / "missing")


def test_a_mean_above_the_longest_answer_is_refused() -> None:
    with pytest.raises(UserError, match=r"simulate.lengths.mean = 9000 .*rollout.max_new_tokens = 8192"):
        open_lengths(cluster(simulate={"lengths": {"mean": 9000}}))
