r"""Answers made to cost: each is a plain wrong answer or none at all, soon, and nothing that a text says raises."""

import random
import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleuve.config.settings import RewardSettings
from fleuve.rewards.math import equal, verify_math, warm
from fleuve.rewards.pool import RewardPool
from fleuve.rewards.symbolic import expression
from fleuve.types import Prompt

COSTLY = [
    "9^{9^{9^9}}",
    "9^{999999999}",
    "(9^{9999})^{9999}",
    "2^{2^{2^{2^{2^2}}}}",
    "10^{100000000}",
    "10^{-100000000}",
    "1e1000000000",
    r"1\times 10^{999999999}",
    "(((99999!)!)!)",
    "1000000!",
    r"\binom{1000000}{500000}",
    r"\binom{10^6}{10^5}",
    r"\sum_{k=1}^{1000000000} k",
    r"\prod_{k=1}^{1000000000} k",
    r"\int_0^1 \sin(x^x) dx",
    r"\lim_{x \to 0} \frac{\sin x}{x}",
    "(x+1)^{50000}",
    "(a+b+c+d)^{49}",
    r"\sin(\sin(\sin(9^{500})))",
    "e^{e^{e^{e^{e}}}}",
    "+".join(f"\\sqrt{{{i}}}" for i in range(2, 45)),
    r"\frac{1}{" * 11 + "2" + "}" * 11,
    r"\frac{1}{" * 3000 + "2" + "}" * 3000,
    r"\sqrt{" * 10_000 + "2" + "}" * 10_000,
    "{" * 10_000 + "5" + "}" * 10_000,
    "(" * 10_000 + "5" + ")" * 10_000,
    "9" * 1_000_000,
    "0." + "3" * 1_000_000,
    "1/" + "3" * 1_000_000,
    "1," * 100_000,
    "=" * 5_000,
    "x=" * 200 + "6",
    r"\pm" * 100,
    r"\{" + ",".join(["x+1"] * 60) + r"\}",
    r"\begin{pmatrix}" + "1&" * 200 + r"\end{pmatrix}",
    r"\text{" * 100,
    "$" * 500,
    "¤" * 500,
    " " * 500 + "6",
]


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


@pytest.mark.parametrize("wanted", ["5", "x^2+1", r"\{1,2\}", "(1,2)", "(C)"])
@pytest.mark.parametrize("answer", COSTLY, ids=lambda text: text[:20])
def test_a_costly_answer_costs_little(answer: str, wanted: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    assert verify_math(f"so \\boxed{{{answer}}}", wanted) == 0.0
    assert verify_math(f"the answer is {answer}", wanted) == 0.0
    assert not equal(answer, wanted)
    assert time.process_time() - start < 3.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


@pytest.mark.parametrize(
    "text",
    [
        "x" * 1_000_000,
        r"\boxed{" * 150_000,
        r"\boxed{5" + "}" * 0 + "x" * 1_000_000,
        "answer: " * 125_000,
        "the option is " * 70_000,
        "<answer>" * 125_000,
        "1/" * 500_000,
        "1 " * 500_000,
        "$1$ " * 250_000 + "$",
        r"\( " * 300_000,
        "\n" * 1_000_000,
    ],
    ids=lambda text: text[:12],
)
def test_a_megabyte_of_text_is_read_in_bounded_time(text: str) -> None:
    start = time.process_time()
    assert verify_math(text, "5") == 0.0
    assert time.process_time() - start < 2.0


PIECES = [
    "\\frac", "\\sqrt", "\\boxed{", "\\text{", "\\left(", "\\right)", "\\begin{pmatrix}", "\\end{pmatrix}", "\\pm",
    "\\cup", "\\in", "\\le", "\\infty", "\\pi", "\\%", "\\$", "^{\\circ}", "^", "_", "{", "}", "(", ")", "[", "]", ",",
    "=", "<", ">", "1", "23", ".5", "x", "y", "cm", " or ", " and ", "million", "%", "$", "&", "\\\\", "-", "+", "/",
    "!", "\\{", "\\}", "\\sin", "\\log", "C", "i", "e",
]  # fmt: skip


@settings(max_examples=150)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.sampled_from(PIECES), max_size=8))
def test_no_answer_raises(answer: list[str], wanted: list[str]) -> None:
    assert equal("".join(answer), "".join(wanted)) in (True, False)


def test_what_is_the_same_text_is_the_same_answer() -> None:
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(["1", "x", "+", "\\pi", "^2", "\\frac{1}{2}", "(", ")", ","], k=6)) + "1"
        assert equal(text, text)


def test_numbers_are_weighed_before_they_are_computed() -> None:
    assert expression("9^{9^{9^9}}") is None
    assert expression("2^{100}") is not None
    assert expression("(x+1)^{5000}") is None
    assert expression("x^{2000}") is not None


async def test_a_check_that_takes_for_ever_all_the_same_has_no_verdict() -> None:
    reward = RewardSettings(workers=1, deadline=5.0)
    prompt = Prompt(id="0", input_ids=[1], text="?", answer="5", verifier="math")
    async with RewardPool(reward, ["math"]) as pool:
        for answer in COSTLY[:4]:
            verdict = await pool.score(prompt, f"\\boxed{{{answer}}}")
            assert verdict.score in (0.0, None)
            assert verdict.score is not None or verdict.reason
        assert (await pool.score(prompt, r"\boxed{5}")).score == 1.0
