"""The closed forms of the simulated engine, each against its plain counterpart."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleuve.simulate.history import VersionHistory
from fleuve.simulate.staleness import staleness_counts
from fleuve.simulate.stretch import Stretch
from fleuve.types import Trajectory

stretches = st.builds(
    Stretch,
    sequences=st.integers(1, 500),
    kv=st.integers(0, 2_000_000),
    base=st.floats(1e-4, 0.1),
    per_kv=st.sampled_from([0.0, 1e-9, 1e-6]),
)


@given(stretches, st.integers(0, 300))
def test_the_time_of_some_steps_is_the_sum_of_each(stretch: Stretch, steps: int) -> None:
    kv, total = stretch.kv, 0.0
    for _ in range(steps):
        total += stretch.base + stretch.per_kv * kv
        kv += stretch.sequences
    assert np.isclose(stretch.seconds(steps), total, rtol=1e-12, atol=0)


@given(stretches, st.floats(0, 1e5))
def test_the_step_in_progress_is_the_first_that_ends_no_earlier(stretch: Stretch, seconds: float) -> None:
    steps = stretch.steps_until(seconds)
    assert stretch.seconds(steps) >= seconds
    assert steps == 0 or stretch.seconds(steps - 1) < seconds


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=20))
def test_the_history_says_of_every_step_what_it_sampled_with(events: list[tuple[int, int]]) -> None:
    """Also across arrays (here of 16 steps), for whoever began at most 30 steps ago."""
    truth: list[int] = []
    step = 0
    history = VersionHistory(0, oldest=lambda: max(0, step - 30), chunk=16)
    for version, (ahead, back) in enumerate(events, start=1):
        truth += [version - 1] * ahead
        step += ahead
        start = max(0, step - back)
        history.reach(step)
        assert history.between(start, step).tolist() == truth[start:]
        history.load(version, step)


@given(st.lists(st.lists(st.integers(0, 9), max_size=30).map(sorted), max_size=5))
def test_staleness_is_counted_as_token_by_token(answers: list[list[int]]) -> None:
    trajectories = [
        Trajectory(
            prompt_ids=np.zeros(1, np.int32),
            output_ids=np.zeros(len(versions), np.int32),
            logprobs=np.zeros(len(versions), np.float32),
            versions=np.array(versions, np.int32),
            loss_mask=np.ones(len(versions), np.bool_),
            finish_reason="stop",
        )
        for versions in answers
    ]
    assert staleness_counts(trajectories, 10) == Counter(10 - v for versions in answers for v in versions)
