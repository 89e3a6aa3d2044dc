"""Which steps of a simulation count, and what is said where they are not the steady state."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fleuve.simulate.window import COUNTED, LONGEST_PIPELINE, Window, warmup_steps


def passed(window: Window, staleness: Iterable[float]) -> int:
    """How many steps it takes."""
    for done, stale in enumerate(staleness, start=1):
        if window.step(stale):
            return done
    raise AssertionError("it never ends")


def climbing(to: float) -> Iterable[float]:
    return (min(float(step), to) for step in range(1000))


@pytest.mark.parametrize("eta", [0, 1, 4, 16, 17, 40, LONGEST_PIPELINE])
def test_as_many_steps_are_passed_over_as_staleness_can_grow_in_and_four(eta: int) -> None:
    window = Window(eta, 500)
    assert passed(window, climbing(eta)) == eta + 4 + COUNTED
    assert window.warmup == eta + 4
    assert window.caveat() == ""


def test_without_a_bound_the_pipeline_is_not_filled_and_that_is_said() -> None:
    window = Window(1_000_000, 500)
    assert passed(window, climbing(500)) == LONGEST_PIPELINE + 4 + COUNTED
    assert "staleness was not steady over the steps that count: 72.5 in the first half, 82.5" in window.caveat()


def test_a_bound_that_staleness_never_reaches_is_no_trouble() -> None:
    window = Window(1_000_000, 500)
    passed(window, climbing(7))
    assert window.caveat() == ""


@pytest.mark.parametrize("given", [1, 3, warmup_steps(4)])
def test_of_steps_that_are_the_start_up_all_count_and_that_is_said(given: int) -> None:
    window = Window(4, 500, given)
    assert passed(window, climbing(4)) == given
    assert window.warmup == 0
    assert f"these {given} steps are the start of the run" in window.caveat()
    assert "--simulate.steps 28" in window.caveat()


def test_of_a_whole_run_nothing_is_taken_from_elsewhere() -> None:
    window = Window(4, 3)
    assert passed(window, climbing(4)) == 3
    assert window.caveat() == ""
