"""Small programs: a list of numbers goes through some steps, and tests that the prompt does not show decide.

    prompt       sort, drop first, times 3?

    completion   def f(x):
                  x=sorted(x)
                  x=x[1:]
                  x=[v*3 for v in x]
                  return x

A row carries its tests as the verifier `code` takes them, and names that verifier. Each step has a mistake that
people make with it (`x.sort()` returns nothing, `v^2` is no square, `x*3` repeats a list). Inputs are chosen until
every such mistake, and every step left out, has failed a test, where any of a few dozen inputs can show it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

LARGEST = 9
"""Inputs hold numbers of `-LARGEST..LARGEST`; a step's own number is in 2..LARGEST."""
LONGEST = 9
"""Numbers in an input."""
TESTS = 6
TRIES = 32
"""Inputs that are tried for one problem."""


class Step(NamedTuple):
    """What the prompt says, and expressions of `x`: the right one and the mistake. `{k}` is the step's number."""

    words: str
    right: str
    mistake: str


MAPS = (
    Step("add {k}", "[v+{k} for v in x]", "x+[{k}]"),
    Step("times {k}", "[v*{k} for v in x]", "x*{k}"),
    Step("negate", "[-v for v in x]", "-x"),
    Step("square", "[v*v for v in x]", "[v^2 for v in x]"),
    Step("halve", "[v//2 for v in x]", "[v/2 for v in x]"),
    Step("append {k}", "x+[{k}]", "x.append({k})"),
    Step("sort", "sorted(x)", "x.sort()"),
    Step("reverse", "x[::-1]", "x.reverse()"),
    Step("mirror", "x+x[::-1]", "x+x.reverse()"),
    Step("unique", "list(dict.fromkeys(x))", "list(set(x))"),
    Step("drop first", "x[1:]", "x.pop(0)"),
    Step("drop last", "x[:-1]", "x[:1]"),
    Step("first {k}", "x[:{k}]", "x[0:{k}-1]"),
    Step("last {k}", "x[-{k}:]", "x[{k}:]"),
    Step("every other", "x[::2]", "x[2:]"),
    Step("keep even", "[v for v in x if v%2==0]", "[v for v in x if v%2]"),
    Step("keep odd", "[v for v in x if v%2]", "[v for v in x if v%2==0]"),
    Step("keep over {k}", "[v for v in x if v>{k}]", "[v for v in x if v>={k}]"),
    Step("keep under {k}", "[v for v in x if v<{k}]", "[v for v in x if v<={k}]"),
)
"""From a list to a list."""

ENDS = (
    Step("sum", "sum(x)", "x.sum()"),
    Step("length", "len(x)", "x.len()"),
    Step("count {k}", "x.count({k})", "len({k})"),
    Step("maximum or 0", "max(x,default=0)", "max(x)"),
    Step("minimum or 0", "min(x,default=0)", "min(x)"),
)
"""From a list to a number: only as the last of several steps."""

END_SHARE = 0.3


@dataclass(frozen=True)
class Program:
    """A problem has 1 to `max_steps` different steps, each number as often.

    `slip` is the probability that a step of a demonstration is written with its mistake, `forget` that a demonstration
    of several steps leaves one out. Both are there to teach a model that could do better to be careless, so that
    reinforcement has something to find out; tests and `answer` are right in any case.
    """

    max_steps: int = 4
    slip: float = 0.0
    forget: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_steps <= len(MAPS):
            raise ValueError(f"max_steps={self.max_steps} is not in 1..{len(MAPS)}")
        if not (0 <= self.slip <= 1 and 0 <= self.forget <= 1):
            raise ValueError(f"slip={self.slip} and forget={self.forget} are probabilities")

    def row(self, rng: random.Random) -> dict[str, Any]:
        """One problem with its `tests` and `verifier`, and one demonstration; `answer` is a right program."""
        steps = _steps(rng, rng.randint(1, self.max_steps))
        lines = [step.mistake if rng.random() < self.slip else step.right for step in steps]
        if len(steps) > 1 and rng.random() < self.forget:
            del lines[rng.randrange(len(lines))]
        right = [step.right for step in steps]
        return {
            "prompt": ", ".join(step.words for step in steps) + "?",
            "answer": source(right),
            "completion": source(lines),
            "tests": [f"assert f({given!r}) == {_value(right, given)!r}" for given in _inputs(steps, rng)],
            "verifier": "code",
        }


def source(expressions: Sequence[str]) -> str:
    """The program that takes `x` through these expressions, one after the other."""
    return "\n".join(["def f(x):", *(f" x={expression}" for expression in expressions), " return x"])


def _steps(rng: random.Random, count: int) -> list[Step]:
    chosen = rng.sample(MAPS, count)
    if count > 1 and rng.random() < END_SHARE:
        chosen[-1] = rng.choice(ENDS)
    numbers = [rng.randint(2, LARGEST) for _ in chosen]
    return [Step(*(text.replace("{k}", str(k)) for text in step)) for step, k in zip(chosen, numbers, strict=True)]


def _inputs(steps: Sequence[Step], rng: random.Random) -> list[list[int]]:
    """`TESTS` different lists, first those that tell a wrong program from the right one."""
    right = [step.right for step in steps]
    wrong = list(_wrong(steps))
    telling: list[list[int]] = []
    others: list[list[int]] = []
    for number in range(TRIES):
        if len(telling) == TESTS or (not wrong and len(telling) + len(others) >= TESTS):
            break
        length = rng.randint(1, LONGEST) if number else 0  # the empty list is tried first
        given = [rng.randint(-LARGEST, LARGEST) for _ in range(length)]
        if given in telling or given in others:
            continue
        expected = _value(right, given)
        fooled = [program for program in wrong if _value(program, given) == expected]
        (telling if len(fooled) < len(wrong) else others).append(given)
        wrong = fooled
    return (telling + others)[:TESTS]


def _wrong(steps: Sequence[Step]) -> Iterator[list[str]]:
    """Each step with its mistake, and each step left out."""
    right = [step.right for step in steps]
    for number, step in enumerate(steps):
        yield [*right[:number], step.mistake, *right[number + 1 :]]
        yield [*right[:number], *right[number + 1 :]]


def _value(expressions: Sequence[str], given: Sequence[int]) -> Any:
    """What the program makes of the input; None if it ends in an error, as of one that returns nothing."""
    x: Any = list(given)
    try:
        for expression in expressions:
            x = _compiled(expression)(x)
    except (TypeError, AttributeError, IndexError, ValueError):
        return None
    return x


@cache
def _compiled(expression: str) -> Callable[[Any], Any]:
    """One of this module's own expressions as a function."""
    function: Callable[[Any], Any] = eval(f"lambda x: {expression}")
    return function
