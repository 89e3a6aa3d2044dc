r"""What the maths verifier accepts and refuses."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleuve.rewards.extraction import TAIL, extract
from fleuve.rewards.math import verify_math

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{5.0}", "5"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{\$32,\!348}", "32348"),
        (r"\boxed{18 \text{ dollars}}", "18"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}"),
        (r"\boxed{2\sqrt{13}}", r"\sqrt{52}"),
        (r"\boxed{(1, \frac{4}{2})}", "(1,2)"),
        (r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}"),
        (r"\boxed{1+\sqrt{19}, 1-\sqrt{19}}", r"1 \pm \sqrt{19}"),
        (r"\boxed{\text{Evelyn}}", "Evelyn"),
        (r"\boxed{30}", r"30^\circ"),
        (r"\boxed{20\%}", r"20\%"),
        (r"\boxed{20\%}", "0.2"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{x=5}", "5"),
        (r"\boxed{52_{8}}", "52_8"),
        ("7*3=21;12+21=33;33-4=29;#29", "29"),
        ("She makes 9 * 2 = 18 dollars.\n#### 18", "18"),
        ("#### 18", "16 - 3 - 4 = 9.\n#### 18"),
        ("The answer is 18 dollars a day.", "18"),
        ("**Answer:** 18", "18"),
        ("The answer is: $\\frac{3}{4}$.", r"\frac{3}{4}"),
        ("first 3 apples, then 4, so 7.", "7"),
        ("The total is -3", "-3"),
        (r"\boxed{3}, no, wait: \boxed{4}", "4"),
        (r"\boxed{4} and then an unfinished \boxed{7", "4"),
    ],
)
def test_a_right_answer_scores_one(text: str, answer: str) -> None:
    assert verify_math(text, answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5\%}", "5"),
        (r"\boxed{5}", r"5\%"),
        (r"\boxed{5 percent}", "5"),
        (r"\boxed{\frac{1}{2}\%}", r"\frac{1}{2}"),
        (r"\boxed{1,2,3}", "3,2,1"),
        (r"\boxed{(1,2,3)}", "(3,2,1)"),
        (r"\boxed{3}\boxed{4}", "3"),
        (r"\boxed{3} and \boxed{4}", "3,4"),
        (r"\boxed{5, 5}", "5"),
        (r"\boxed{(1,2]}", "[1,2]"),
        (r"\boxed{(1,2)}", "[1,2]"),
        (r"\boxed{3\pi}", "3"),
        (r"\boxed{3 pi}", "3"),
        (r"\boxed{3 thousand}", "3"),
        (r"\boxed{52}", "5.2"),
        (r"\boxed{-3}", "3"),
        (r"\boxed{52_9}", "52_8"),
        (r"\boxed{52_9}", "52"),
        (r"\boxed{3x}", "3"),
        (r"\boxed{x+1}", "x+2"),
        (r"\boxed{0.3}", r"\frac{1}{3}"),
        (r"\boxed{1/0}", "1"),
        (r"\boxed{}", ""),
        ("", "5"),
        ("5", ""),
        ("no number at all", "5"),
        ("it is 15", "5"),
        ("the 5th of May 2020", "5"),
        ("#### 5\nno, that was wrong\n#### 6", "5"),
    ],
)
def test_a_wrong_answer_scores_zero(text: str, answer: str) -> None:
    assert verify_math(text, answer) == 0.0


def test_the_last_box_counts_and_not_the_set_of_boxes() -> None:
    assert extract(r"\boxed{1} \boxed{2}") == "2"
    assert extract(r"\boxed{\{a\}}") == r"\{a\}"
    assert extract(r"\boxed{\left\{ 2 \right.}") == r"\left\{ 2 \right."


@pytest.mark.parametrize(
    "text",
    [
        "1" * 1_000_000,
        "x" * 1_000_000 + r"\boxed{6}",
        r"\boxed{" + "{" * 10_000 + "5" + "}" * 10_000 + "}",
        r"\boxed{" * 10_000,
        "{" * 10_000,
        r"\boxed{" + "(" * 3000 + "5" + ")" * 3000 + "}",
        r"\boxed{" + "1+" * 3000 + "5}",
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{9^{999999999}}",
        r"\boxed{(((99999!)!)!)}",
        r"\boxed{\frac{1}{" + "9" * 400 + "}}",
        "#" * 500_000,
        "answer is " * 100_000,
        "$" * 100_000,
        "1,111" * 50_000,
        "\\" * 100_001,
        "\x00\ud800 \\boxed{\ud800}",
    ],
)
def test_hostile_text_is_refused_in_bounded_time(text: str) -> None:
    verify_math(r"\boxed{x+1}", "1+x")  # the library's import is not what is measured
    start = time.process_time()
    assert verify_math(text, "5") == 0.0
    assert time.process_time() - start < 1.0


@settings(max_examples=100)
@given(
    st.text(r"0123456789+-*/^_(){}[]\\boxed#$%,. \nfrac", max_size=80), st.sampled_from(["5", "1,2", r"\frac12", "x"])
)
def test_no_text_makes_it_raise(text: str, answer: str) -> None:
    assert verify_math(text, answer) in (0.0, 1.0)


def test_only_the_tail_of_a_long_text_is_looked_at() -> None:
    assert extract(r"\boxed{5}" + " " * (TAIL + 1)) is None


def test_text_is_never_evaluated_as_code(tmp_path: Path) -> None:
    target = tmp_path / "written"
    for text in (f"__import__('pathlib').Path('{target}').touch()", f"(open('{target}','w'))+1"):
        assert verify_math(f"\\boxed{{{text}}}", "x+1") == 0.0
        assert verify_math(text, "x+1") == 0.0
    assert not target.exists()


def test_exact_numbers_are_cheap_and_do_not_start_sympy() -> None:
    code = (
        "import sys, time; from fleuve.rewards.math import verify_math\n"
        "pairs = [('#### 18', '18'), (r'\\boxed{18}', '19'), (r'\\boxed{1/2}', '0.5')]\n"
        "t = time.process_time()\n"
        "assert [verify_math(*p) for p in pairs * 100] == [1.0, 0.0, 1.0] * 100\n"
        "print((time.process_time() - t) / 300); assert 'sympy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert float(done.stdout) < 1e-3  # 0.01 to 0.1 ms; the machine may be busy


def test_works_in_a_thread_that_is_not_the_main_one() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(verify_math, r"\boxed{2x+x}", "3x").result() == 1.0


def rows(name: str) -> list[dict[str, str]]:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not on this machine (it stays outside the repository)")
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_against_own_and_next(solutions: list[str], answers: list[str], same: set[tuple[str, str]]) -> None:
    for i, (solution, own) in enumerate(zip(solutions, answers, strict=True)):
        neighbour = answers[(i + 1) % len(answers)]
        assert verify_math(solution, own) == 1.0, own
        expected = own == neighbour or (own, neighbour) in same
        assert verify_math(solution, neighbour) == float(expected), (own, neighbour)


def test_every_reference_solution_of_math500_scores_one_for_its_own_answer_and_zero_for_the_next() -> None:
    data = rows("math500.jsonl")
    # The one pair of different spellings that are the same answer.
    check_against_own_and_next([r["solution"] for r in data], [r["answer"] for r in data], {("5", "x=5")})


def test_every_reference_of_math500_equals_itself_as_a_plain_answer() -> None:
    for row in rows("math500.jsonl"):
        assert verify_math(f"The answer is ${row['answer']}$.", row["answer"]) == 1.0, row["answer"]


def test_every_gsm8k_solution_scores_one_for_its_own_answer_and_zero_for_the_next() -> None:
    data = rows("gsm8k_test.jsonl")
    answers = [r["answer"].rpartition("####")[2].strip().replace(",", "") for r in data]
    check_against_own_and_next([r["answer"] for r in data], answers, set())
