"""Schedule fuzzing: the production controller keeps its promises under every seed, in a world in which everything that
can go wrong does. That the fuzzer would notice if it did not: `test_controller_mutants.py`, `test_fleet_mutants.py`."""

import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from mutation import one_slot_more

from fleuve.simulate import fuzz
from fleuve.simulate.faults import draw
from fleuve.simulate.fuzz import play, play_all

SEEDS = 2000


@functools.cache
def played(part: int) -> Counter[str]:
    """What a quarter of the seeds came to, by kind; every promise is kept in all of them."""
    seen: Counter[str] = Counter()
    for outcome in play_all(range(part * SEEDS // 4, (part + 1) * SEEDS // 4)):
        assert not outcome.violation, outcome.explain()
        seen += outcome.seen
        seen.update(f"ended: {end.partition(':')[0]}" for end in outcome.ended)
        seen["resumed"] += len(outcome.ended) - 1
        seen["answers handed on to the next life"] += outcome.handed_on > 0
        seen["answers handed on to another worker"] += outcome.kept_tokens > 0
        seen["restarts"] += outcome.restarts
    return seen


@pytest.mark.parametrize("part", range(4))
def test_every_promise_is_kept_under_every_schedule(part):
    played(part)


AT_LEAST = """
    150 hang                  80 away                 300 dies                 150 reborn
    100 add                   80 remove               100 at once               70 not started
    300 lost                1000 refused              300 aborted              300 mixed up              700 slow
    150 cut off              150 deadly request         8 lost with every token known
     15 false: lengths        15 false: token          15 false: logprob        15 false: old             15 false: new
     15 false: empty          15 false: long           20 false progress
    700 verdict: none        500 verdict: NaN         700 verdict: late        150 verdict: never
     25 update failed        150 trainer lost         150 slow step             30 step cut short
     30 given up: silent for                          120 given up: cannot be   30 given up: has weights
     70 given up: update                              300 given up: connection lost
    200 dropped: timeout    1500 dropped: rollout failed                       200 dropped: no verdict
    300 dropped: truncated  1500 dropped: no signal    60 dropped: overdue
     15 no rollout worker for                          40 no rollout worker is left
     30 prompts in a row failed                        15 had no signal
    700 ended: done          150 ended: stopped        70 ended: cancelled     100 ended: RunError
    200 ended: TrainerError  250 resumed              200 restarts
     70 answers handed on to the next life             25 answers handed on to another worker
"""
"""About a third of what there is: no kind of trouble, and nothing that is made of it, may go out of use unnoticed."""


def test_everything_that_can_go_wrong_does_often_enough():
    seen = sum((played(part) for part in range(4)), Counter())
    least = {what: int(times) for times, what in re.findall(r"(\d+) ((?:\S| (?! ))+)", AT_LEAST)}
    assert len(least) > 50
    assert {what: f"{seen[what]} < {times}" for what, times in least.items() if seen[what] < times} == {}


def test_a_seed_replays_exactly_in_any_process():
    seeds = range(30, 42)
    here = [play(seed).digest for seed in seeds]
    assert [play(seed).digest for seed in seeds] == here
    assert len(set(here)) == len(here)
    code = f"from fleuve.simulate.fuzz import play\nprint([play(seed).digest for seed in {seeds!r}])"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        there = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=60
        )
        assert there.stdout.strip() == str(here)


def test_a_failing_seed_prints_its_schedule_what_happened_and_how_to_see_it_again(monkeypatch, capsys):
    one_slot_more(monkeypatch)
    assert fuzz.main(["--seeds", "0..400"]) == 1
    shown = capsys.readouterr().out
    assert "groups are admitted at η = " in shown
    assert "  batch_size = " in shown
    again = next(line for line in shown.splitlines() if line.startswith("again: "))
    assert fuzz.main(again.split()[-2:]) == 1
    assert capsys.readouterr().out == shown


def test_many_seeds_end_with_a_summary(capsys):
    assert fuzz.main(["--seeds", "0..8", "--processes", "2"]) == 0
    assert capsys.readouterr().out.startswith("8 seeds kept every promise")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--seeds", "9..3"], "--seeds 9..3: there is no seed in it; 9..10 is one, 9"),
        (["--seeds", "3..3"], "--seeds 3..3: there is no seed in it; 3..4 is one, 3"),
        (["--seeds=-4"], "--seeds -4: write 0..2000 for the seeds from 0 to 1999, or one seed, such as 1234"),
        (["--seeds", "0..x"], "--seeds 0..x: write 0..2000 for the seeds from 0 to 1999, or one seed, such as 1234"),
        (["--seeds", "0..4", "--processes", "-3"], "--processes -3: write how many, or 0 for one a core"),
        (["--seeds", "0..4", "--bogus"], "unrecognized arguments: --bogus"),
        ([], "the following arguments are required: --seeds"),
    ],
)
def test_what_cannot_be_asked_for_is_said_in_one_line(words, line, capsys):
    assert fuzz.main(words) == 2
    assert capsys.readouterr() == ("", line + "\n")


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_ctrl_c_ends_it_with_one_line(processes):
    words = [sys.executable, "-u", "-m", "fleuve.simulate.fuzz", "--seeds", "0..1000000", "--processes", processes]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    time.sleep(4.0)  # at work, or at its imports still on a machine that is very busy
    os.killpg(process.pid, signal.SIGINT)
    said, complained = process.communicate(timeout=30)
    assert (process.returncode, said, complained) == (130, b"", b"interrupted: no seed had failed\n")


def test_the_same_case_is_drawn_of_a_seed_every_time():
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({dataclasses.replace(draw(seed), seed=0) for seed in range(50)}) == 50
