"""Answers that are equal only for positive numbers, only nearly, or with a remark; and what cannot be seen."""

import time

import pytest

from fleuve.rewards.extraction import extract
from fleuve.rewards.math import verify_math


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("|x|", "x"),
        (r"\sqrt{x^2}", "x"),
        (r"\sqrt{x^2}+1", "x+1"),
        (r"\frac{x}{|x|}", "1"),
        (r"\sqrt{x^2y^2}", "xy"),
        (r"|x|y", "xy"),
        (r"x|y|", "xy"),
        (r"|xyz|", "xyz"),
        (r"\sqrt{(x-1)^2}", "x-1"),
        (r"\sqrt[4]{x^4}", "x"),
        (r"\ln(x^2)-\ln(|x|)", r"x-x+\ln(2)"),
        (r"\sqrt{xy}\sqrt{yz}", r"y\sqrt{xz}"),
        ("y=|x|", "y=x"),
        (r"y=\sqrt{x^2}", "y-x=0"),
    ],
)
def test_equal_for_positive_numbers_alone_is_not_equal(one: str, other: str) -> None:
    assert verify_math(f"\\boxed{{{one}}}", other) == 0.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\sqrt{x^2}", "|x|"),
        (r"|x||y|", "|xy|"),
        (r"\sqrt{x^4}", "x^2"),
        (r"|x|^2", "x^2"),
        (r"\frac{|x|}{x}", r"\frac{x}{|x|}"),
        # Whoever writes these takes the variables for positive: they are not real otherwise.
        (r"\sqrt{a}\sqrt{b}", r"\sqrt{ab}"),
        (r"\sqrt{x}^2", "x"),
        (r"\frac{\sqrt{x}}{x}", r"\frac{1}{\sqrt{x}}"),
        (r"x\sqrt{x}", "x^{3/2}"),
        (r"2\ln x", r"\ln(x^2)"),
        (r"\ln a+\ln b", r"\ln(ab)"),
        (r"e^{\ln x}", "x"),
        (r"\sqrt[3]{x^3}", "x"),
        ("y=|x|", r"y=\sqrt{x^2}"),
        (r"\sin(-x)", r"-\sin x"),
        (r"\cos(-x)", r"\cos x"),
    ],
)
def test_equal_wherever_both_are_real_is_equal(one: str, other: str) -> None:
    assert verify_math(f"\\boxed{{{one}}}", other) == 1.0


@pytest.mark.parametrize(
    ("given", "answer", "score"),
    [
        (r"3 \approx 4", "3", 0.0),
        (r"4 \approx 3", "3", 0.0),
        (r"4 \approx 3", "4", 0.0),
        (r"14.9 \approx 14", "14.9", 1.0),
        (r"3 \approx 3.5", "3", 0.0),
        (r"\frac13 \approx 0.4", r"\frac13", 0.0),
        (r"\sqrt2 \approx 1.5", r"\sqrt2", 0.0),
        (r"2\pi \approx 6.4", r"2\pi", 0.0),
        (r"\frac13 \approx 0.33", r"\frac13", 1.0),
        (r"\frac23 \approx 0.66", r"\frac23", 1.0),
        (r"\frac23 \approx 0.67", r"\frac23", 1.0),
        (r"\sqrt2 \approx 1.414", r"\sqrt2", 1.0),
        (r"\pi \approx \frac{22}{7}", r"\pi", 1.0),
        (r"98765 \approx 99,000", "98765", 1.0),
        (r"14.5 \approx 15", "14.5", 1.0),
        (r"1234567 \approx 1.23 \times 10^6", "1234567", 1.0),
        (r"x \approx 3.14", "3.14", 1.0),
        (r"2\pi r \approx 6.28r", r"2\pi r", 1.0),
        (r"18\text{ cm} \approx 7\text{ in}", "18", 1.0),
    ],
)
def test_an_approximation_must_be_one(given: str, answer: str, score: float) -> None:
    assert verify_math(f"\\boxed{{{given}}}", answer) == score


@pytest.mark.parametrize(
    ("remark", "score"),
    [
        (r"\text{ (maybe 4)}", 0.0),
        (r"\text{ (or 4)}", 0.0),
        (r"\text{ maybe}", 0.0),
        (r"\text{ perhaps four}", 0.0),
        (r"\text{ (4)}", 0.0),
        (r"\text{ (four)}", 0.0),
        (r"\text{ apples, not 4}", 0.0),
        (r"\text{ cm?}", 0.0),
        (r"\text{ in 6}", 0.0),
        (r"\text{ is a wrong answer}", 0.0),
        (r"\text{ m (meters)}", 1.0),
        (r"\text{ apple(s)}", 1.0),
        (r"\text{ cm}^2", 1.0),
        (r"\text{ cm2}", 1.0),
        (r"\text{ red marbles}", 1.0),
        (r"\text{ dollars per day}", 1.0),
    ],
)
def test_a_unit_may_stand_behind_a_number_and_a_second_thought_may_not(remark: str, score: float) -> None:
    assert verify_math(f"\\boxed{{3{remark}}}", "3") == score


@pytest.mark.parametrize("mark", ["\u200b", "\u200c", "\u200d", "\u200e", "\u2060", "\ufeff", "\u00ad"])
def test_characters_of_no_width_are_no_part_of_an_answer(mark: str) -> None:
    assert verify_math(f"\\boxed{{3{mark}}}", "3") == 1.0
    assert verify_math(f"\\boxed{{{mark}1{mark}2}}", f"{mark}12") == 1.0
    assert verify_math(f"The ans{mark}wer is {mark}1{mark}2.", "12") == 1.0
    assert verify_math(f"#### 1{mark}2", "12") == 1.0
    assert verify_math(f"\\boxed{{3{mark}}}", "4") == 0.0
    assert extract(f"\\box{mark}ed{{3}}") == "3"


@pytest.mark.parametrize(
    ("one", "other", "score"),
    [
        ("(x+1)^{1000}", "(1+x)^{1000}", 1.0),
        ("(x+1)^{1000}", "(1+x)^{999}(x+1)", 1.0),
        ("(x+1)^{1000}", "(x+1)^{1001}", 0.0),
        ("(x+1)^{1000}", "(x+2)^{1000}", 0.0),
        ("(x+y+z)^{200}", "(z+y+x)^{200}", 1.0),
        ("(x+y)^{1000}-(y+x)^{1000}", "1", 0.0),
        ("f(x)(x+1)^{900}", "f(x)(x+2)^{900}", 0.0),
        ("(x+1)^{100000}", "(x+2)^{100000}", 0.0),
        ("((x+1)^{100})^{100}", "1", 0.0),
        ("y=(x+1)^{700}", "y=(1+x)^{700}", 1.0),
    ],
)
def test_high_powers_of_sums_are_compared_and_never_expanded(one: str, other: str, score: float) -> None:
    verify_math(r"\boxed{x+1}", "1+x")  # the library's import is not what is measured
    start = time.process_time()
    assert verify_math(f"\\boxed{{{one}}}", other) == score
    assert time.process_time() - start < 1.0
