"""Where benchmarks leave their results: a quick run never in the place of a full one's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import _report  # noqa: E402

FULL, SHORT = ["benchmark.py"], ["benchmark.py", "--quick"]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_report, "RESULTS", tmp_path)
    return tmp_path


def reported(figure: int, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    _report.report("speed", {"figure": figure}, [{"case": "a", "figure": figure}])


def figure(path: Path) -> int:
    return int(json.loads(path.read_text())["headline"]["figure"])


@pytest.mark.parametrize("flag", ["--quick", "--qui"])
def test_a_quick_run_leaves_a_full_runs_result_alone(
    flag: str, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported(1, FULL, monkeypatch)
    reported(2, ["benchmark.py", "--rounds", "1", flag], monkeypatch)
    assert figure(results / "speed.json") == 1
    assert figure(results / "speed.quick.json") == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"written to {results / 'speed.quick.json'}"
    assert json.loads(lines[-1])["headline"] == {"figure": 2}


def test_where_there_is_no_full_runs_a_quick_one_writes_the_file_and_any_run_replaces_it(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, words in enumerate((SHORT, SHORT, FULL, FULL)):
        reported(number, words, monkeypatch)
        assert figure(results / "speed.json") == number
    assert [path.name for path in results.iterdir()] == ["speed.json"]


def test_every_benchmark_that_has_a_quick_run_reports_by_this() -> None:
    """None writes a result of its own."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        text = path.read_text()
        if "--quick" in text and path.name != "_report.py":
            assert "from _report import" in text, path
        assert path.name == "_report.py" or "results/" not in text.replace("`benchmarks/results/", ""), path
