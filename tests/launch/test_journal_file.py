"""The journal on disk: what was written is there when the process is gone, and nothing else is taken for it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from fleuve.control.journal import Admitted, Evaluated, Ready
from fleuve.launch.journal import JournalFile, read_journal, segments
from fleuve.types import Prompt

PROMPT = Prompt(id="p", input_ids=[1, 2], text="", answer="")


def versions(directory: Path, first: int = 0) -> list[int]:
    return [record.version for record in read_journal(directory, first)]  # type: ignore[union-attr]


def write(journal: JournalFile, *numbers: int) -> None:
    for number in numbers:
        journal.write(Evaluated(version=number))


def test_segments_follow_each_other_and_those_that_no_checkpoint_needs_go(tmp_path):
    journal = JournalFile(tmp_path, 0, print)
    for first in (0, 3, 6):
        if first:
            journal.begin_segment()
        write(journal, first, first + 1, first + 2)
    assert versions(tmp_path) == list(range(9))
    assert versions(tmp_path, 4) == list(range(4, 9))
    journal.forget_before(5)
    assert [path.name for path in segments(tmp_path)] == ["000000000003.bin", "000000000006.bin"]
    assert versions(tmp_path, 5) == [5, 6, 7, 8]
    journal.forget_before(6)
    assert versions(tmp_path, 6) == [6, 7, 8]
    journal.close()


def test_a_run_that_goes_back_to_a_record_writes_the_next_and_the_old_ones_are_gone(tmp_path):
    journal = JournalFile(tmp_path, 0, print)
    write(journal, 0, 1, 2)
    journal.begin_segment()
    write(journal, 3, 4)
    JournalFile(tmp_path, 2, print).write(Evaluated(version=20))
    assert versions(tmp_path) == [0, 1, 20]


def test_a_torn_end_is_passed_over_and_a_later_life_goes_on_behind_it(tmp_path):
    journal = JournalFile(tmp_path, 0, print)
    write(journal, 0, 1)
    (segment,) = segments(tmp_path)
    os.truncate(segment, segment.stat().st_size - 1)
    assert versions(tmp_path) == [0]
    write(JournalFile(tmp_path, 1, print), 10, 11)
    assert versions(tmp_path) == [0, 10, 11]


def test_a_process_that_is_killed_loses_nothing_that_it_wrote(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from fleuve.launch.journal import JournalFile\n"
        "from fleuve.control.journal import Evaluated\n"
        "j = JournalFile(pathlib.Path(sys.argv[1]), 0, print)\n"
        "for n in range(10**9):\n  j.write(Evaluated(version=n)); print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(500):
        last = int(process.stdout.readline())
    process.kill()
    rest, _ = process.communicate()
    told = [int(line) for line in rest.splitlines()[:-1]]
    read = versions(tmp_path)
    assert read == list(range(len(read)))
    assert len(read) > max([last, *told])


def test_on_a_full_disk_it_says_so_once_and_the_checkpoint_after_that_makes_it_whole_again(tmp_path):
    notes: list[str] = []
    journal = JournalFile(tmp_path, 0, notes.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    write(journal, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        write(journal, 1, 2, 3, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(notes) == 1
    assert "cannot be written" in notes[0]
    assert journal.silent
    assert versions(tmp_path) == [0, 1]
    journal.begin_segment()
    write(journal, 5)
    assert versions(tmp_path, 5) == [5]
    assert versions(tmp_path, 0) == [0, 1]  # nothing is taken for the records that are missing


def test_a_group_of_ten_thousand_tokens_costs_well_under_a_millisecond(tmp_path):
    """A journal that is written on the event loop must not hold it up."""
    import numpy as np

    from fleuve.types import Trajectory

    answer = Trajectory(
        prompt_ids=np.arange(50, dtype=np.int32),
        output_ids=np.arange(1250, dtype=np.int32),
        logprobs=np.zeros(1250, np.float32),
        versions=np.zeros(1250, np.int32),
        loss_mask=np.ones(1250, np.bool_),
        finish_reason="stop",
        reward=1.0,
    )
    journal = JournalFile(tmp_path, 0, print)
    times = []
    for group in range(100):
        started = time.perf_counter()
        journal.write(Admitted(group=group, prompt=PROMPT, version=0))
        journal.write(Ready(group=group, trajectories=[answer] * 8, admitted_version=0))
        times.append(time.perf_counter() - started)
    size = sum(path.stat().st_size for path in segments(tmp_path)) / 100
    print(f"{1e6 * sorted(times)[50]:.0f} µs, {size / 10_000:.1f} bytes a token")
    assert sorted(times)[50] < 2e-3  # 0.2 ms on a quiet machine
    assert size < 15 * 10_000
