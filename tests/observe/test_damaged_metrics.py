"""A file of metrics that is damaged: one line, which names the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleuve.errors import UserError
from fleuve.observe.metrics import read_metrics
from fleuve.observe.report import report

WHOLE = b'{"step": 1, "reward/mean": 0.5}\n'


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{}", 'no step\'s metrics: "step" is not a whole number'),
        (b'{"step": true}', 'no step\'s metrics: "step" is not a whole number'),
        (b'{"step": 1.5}', 'no step\'s metrics: "step" is not a whole number'),
        (b"[1]", "not a table of metrics"),
        (b"1", "not a table of metrics"),
        (b"null", "not a table of metrics"),
        (b'{"step": 2, "reward/mean": "high"}', "reward/mean is not a number"),
        (b'{"step": 2, "reward/mean": [1]}', "reward/mean is not a number"),
        (b"\xff\xfe\xfd", "not JSON"),
        (b'{"step": 2, "\xff": 1}', "not JSON"),
        (b'{"step": 2', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\0" * 100, "not JSON"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, what: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(WHOLE + line + b"\n" + WHOLE)
    with pytest.raises(UserError) as error:
        report(tmp_path)
    assert str(error.value) == f"{file}, line 2: {what}"


@pytest.mark.parametrize("end", [b"", b"{", b'{"step": 2, "x', b"\0\0\0", b"\xff"])
def test_what_a_kill_or_a_power_failure_left_of_the_last_line_is_passed_over(tmp_path: Path, end: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(WHOLE + end)
    assert [row["step"] for row in read_metrics(file)] == [1]


def test_a_separator_of_lines_that_is_none_of_json_s_is_part_of_a_name(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a\u2028b": 2}\n')
    assert read_metrics(file) == [{"step": 1, "a\u2028b": 2}]
