"""What is left of a run is damaged, or a part is gone: the run goes on with what is whole, says what is not, and
deletes nothing that it cannot make again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from left_runs import copy_of, leave_a_run, make, read, tree

from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.launch.checkpoints import COMMITTED
from fleuve.launch.history import Reading
from fleuve.launch.journal import JournalFile, segments
from fleuve.launch.resume import open_run
from fleuve.launch.settle import settle

NEWEST, EARLIER = "step-000006", "step-000003"
STEPS = 8
FILES = [COMMITTED, "controller.bin", "trainer.safetensors", "model/model.safetensors"]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps that was saved after the second, third and sixth, and keeps two."""
    return leave_a_run(make(tmp_path_factory.mktemp("left")), STEPS, saved=(2, 3, 6))


@pytest.fixture
def run(left: Path, tmp_path: Path) -> Path:
    return copy_of(left, tmp_path / "run")


def go_on(config: Settings) -> tuple[Reading, list[str]]:
    """As `fleuve train` does: all that is said of it, and what it goes on from."""
    opened = open_run(config, "auto")
    try:
        reading = read(opened, config)
        said = [*opened.words(), *settle(opened.run, reading)]
        JournalFile(opened.run.journal, reading.next, print).close()
        return reading, said
    finally:
        opened.run.release()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def each_checkpoint(what: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda run: [what(path) for path in (run / "checkpoints").iterdir()] and None


@pytest.mark.parametrize(
    "damage",
    [
        each_checkpoint(lambda c: (c / COMMITTED).unlink()),
        each_checkpoint(lambda c: (c / COMMITTED).write_text("")),
        each_checkpoint(lambda c: truncate(c / "trainer.safetensors")),
        each_checkpoint(lambda c: flip(c / "trainer.safetensors", 30)),
        each_checkpoint(lambda c: flip(c / "controller.bin", 30)),
        each_checkpoint(lambda c: (c / "trainer.safetensors").unlink()),
        each_checkpoint(shutil.rmtree),
        lambda run: shutil.rmtree(run / "checkpoints"),
    ],
    ids=[
        "unmarked",
        "marker empty",
        "cut off",
        "bit of the state",
        "bit of the groups",
        "file gone",
        "gone",
        "all gone",
    ],
)
def test_without_a_checkpoint_and_with_a_journal_that_began_later_it_refuses_and_touches_nothing(
    run: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(run)
    before = tree(run)
    for _ in range(2):  # each time the same
        with pytest.raises(UserError) as error:
            open_run(make(tmp_path), "auto")
    (line,) = str(error.value).splitlines()
    assert "the journal begins with record 9" in line
    assert "--resume no" in line
    assert "checkpoint" in line or (NEWEST in line and EARLIER in line)
    assert {name: content for name, content in tree(run).items() if name in before} == before


@pytest.mark.parametrize("left_over", ["metrics.jsonl", "rollouts"])
def test_without_checkpoints_and_journal_what_tells_of_steps_is_not_begun_over(
    run: Path, tmp_path: Path, left_over: str
) -> None:
    for path in ("checkpoints", "journal", *{"metrics.jsonl", "rollouts"} - {left_over}):
        shutil.rmtree(run / path) if (run / path).is_dir() else (run / path).unlink()
    before = tree(run)
    with pytest.raises(UserError, match=r"checkpoints and journal are gone, but .*(metrics|rollouts).*--resume no"):
        open_run(make(tmp_path), "auto")
    assert tree(run) == before
    open_run(make(tmp_path), "no").run.release()
    assert tree(tmp_path / "run.1") == before


@given(st.sampled_from(FILES), st.integers(0, 10**6), st.sampled_from(["flip", "cut", "remove"]))
@settings(max_examples=20, phases=[Phase.generate])
def test_whatever_of_the_newest_checkpoint_is_damaged_the_one_before_and_the_journal_lead_to_the_same(
    left: Path, tmp_path_factory: pytest.TempPathFactory, name: str, at: int, how: str
) -> None:
    tmp = tmp_path_factory.mktemp("damaged")
    run = copy_of(left, tmp / "run")
    file = run / "checkpoints" / NEWEST / name
    if how == "flip":
        flip(file, at)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[: at % file.stat().st_size])
    else:
        file.unlink()
    damaged = tree(run)
    reading, said = go_on(make(tmp))
    assert (reading.version, reading.next) == (STEPS, 25)
    assert list(reading.past.running) == [STEPS]
    assert reading.checkpoint is not None
    if reading.checkpoint.path.name == NEWEST:  # a blank of the marker was changed, say
        assert name == COMMITTED
        assert said[1:] == []
        return
    assert (reading.checkpoint.path.name, reading.steps) == (EARLIER, 5)
    if name == COMMITTED and how == "remove":  # as a kill leaves it: what it had is on the way once more
        assert not (run / "checkpoints" / NEWEST).exists()
        return
    assert f"not whole: {NEWEST} (" in said[1]
    assert name == COMMITTED or name in said[1]
    kept = tree(run / "superseded" / "1" / "checkpoints" / NEWEST)
    assert kept == {n.removeprefix(f"checkpoints/{NEWEST}/"): c for n, c in damaged.items() if f"{NEWEST}/" in n}
    assert go_on(make(tmp))[1][1:] == []  # that was said


def test_where_the_journal_does_not_lead_from_the_earlier_checkpoint_to_a_damaged_one_it_refuses(
    run: Path, tmp_path: Path
) -> None:
    flip(run / "checkpoints" / NEWEST / "trainer.safetensors", 3)
    segments(run / "journal")[0].unlink()
    before = tree(run)
    with pytest.raises(UserError) as error:
        open_run(make(tmp_path), "auto")
    (line,) = str(error.value).splitlines()
    for part in (NEWEST, "trainer.safetensors", "is missing", f"--resume {run / 'checkpoints' / EARLIER}", "version 3"):
        assert part in line
    assert tree(run) == before


@given(st.integers(0, 10**6))
@settings(max_examples=20, phases=[Phase.generate])
def test_whatever_byte_of_the_journal_is_damaged_nothing_that_follows_is_deleted(
    left: Path, tmp_path_factory: pytest.TempPathFactory, at: int
) -> None:
    tmp = tmp_path_factory.mktemp("damaged")
    run = copy_of(left, tmp / "run")
    segment = segments(run / "journal")[-1]
    whole = segment.read_bytes()
    flip(segment, at)
    reading, said = go_on(make(tmp))
    assert reading.version < STEPS or at % len(whole) >= whole.rfind(b"admitted") - 50
    if reading.version == STEPS:
        return  # in the last record: it cannot be told from one that was cut off, and its group is sampled again
    lost = range(reading.version + 1, STEPS + 1)
    words = f"step {STEPS}" if len(lost) == 1 else f"steps {lost[0]} to {STEPS}"
    assert [line for line in said if str(segment) in line and f"record {reading.next} is lost" in line]
    assert f"{words} had been reported, and cannot be reached any more: made anew" in said
    assert said[-1] == f"what cannot be used any more is kept in {run / 'superseded' / '1'}"
    aside = tree(run / "superseded" / "1")
    assert {f"rollouts/step-{step:06d}.jsonl" for step in lost} <= set(aside)
    assert len(aside["metrics.jsonl"].splitlines()) == len(lost)
    assert len(aside[f"journal/{segment.name}"]) == len(whole)
    assert len((run / "metrics.jsonl").read_bytes().splitlines()) == reading.version
    assert go_on(make(tmp))[1][1:] == []


@pytest.mark.parametrize("size", [40, 200, 400])
def test_damage_of_many_records_is_seen_if_some_are_whole_behind_it(run: Path, tmp_path: Path, size: int) -> None:
    segment = segments(run / "journal")[-1]
    content = segment.read_bytes()
    place = 20
    assert place + size < len(content) - 90
    segment.write_bytes(content[:place] + bytes(size) + content[place + size :])
    reading, said = go_on(make(tmp_path))
    assert reading.version == 6
    assert any("is damaged: record" in line for line in said)


@pytest.mark.parametrize("size", [1, 30, 200])
def test_an_end_that_is_cut_off_is_no_damage(run: Path, tmp_path: Path, size: int) -> None:
    segment = segments(run / "journal")[-1]
    segment.write_bytes(segment.read_bytes()[:-size])
    _, said = go_on(make(tmp_path))
    assert not [line for line in said if "damaged" in line]


@pytest.mark.parametrize("what", ["all", "last", "first of the checkpoint"])
def test_a_journal_that_is_gone_is_said_and_what_it_would_have_led_to_is_kept(
    run: Path, tmp_path: Path, what: str
) -> None:
    later = segments(run / "journal")[-1]
    if what == "all":
        shutil.rmtree(run / "journal")
    elif what == "last":
        later.unlink()
    else:  # and one more behind it
        journal = JournalFile(run / "journal", 25, print)
        journal.write(next(iter(reading_of(run, tmp_path))))
        journal.close()
        later.unlink()
    reading, said = go_on(make(tmp_path))
    assert (reading.version, reading.steps) == (6, 0)
    assert [line for line in said if "journal" in line and ("tells nothing" in line or "is damaged" in line)]
    assert "steps 7 to 8 had been reported, and cannot be reached any more: made anew" in said
    kept = tree(run / "superseded" / "1")
    assert {"rollouts/step-000007.jsonl", "rollouts/step-000008.jsonl", "metrics.jsonl"} <= set(kept)
    assert ("journal/000000000025.bin" in kept) == (what == "first of the checkpoint")


def reading_of(run: Path, tmp_path: Path) -> list[object]:
    from fleuve.launch.journal import read_journal

    return list(read_journal(run / "journal", 18))


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("metrics.jsonl", "metrics.jsonl has no row of steps 1 to 6"),
        ("rollouts", "rollouts has nothing of steps 1 to 6"),
        ("rollouts/step-000002.jsonl", "rollouts has nothing of step 2"),
    ],
)
def test_reports_that_were_removed_are_said(run: Path, tmp_path: Path, lost: str, said: str) -> None:
    shutil.rmtree(run / lost) if (run / lost).is_dir() else (run / lost).unlink()
    _, lines = go_on(make(tmp_path))
    assert [line for line in lines if said in line and "cannot be made again" in line]


def test_reports_that_were_never_to_be_made_are_not_missed(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "rollouts")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("rollouts = true", "rollouts = false"))
    _, said = go_on(make(tmp_path))
    assert not [line for line in said if "rollouts has nothing" in line]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{}", 'no step\'s metrics: "step" is not a whole number'),
        (b"[1]", "not a table of metrics"),
        (b'{"step": "3"}', 'no step\'s metrics: "step" is not a whole number'),
        (b'{"step": 3, "time/elapsed": "long"}', "time/elapsed is not a number"),
        (b"\xff\xfe{", "not JSON"),
        (b"", "not JSON"),
        (b"\0\0\0", "not JSON"),
    ],
)
def test_a_damaged_line_of_the_metrics_is_named(run: Path, tmp_path: Path, line: bytes, what: str) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    lines[2] = line
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    before = tree(run)
    with pytest.raises(UserError) as error:
        open_run(make(tmp_path), "auto")
    assert str(error.value) == f"{run / 'metrics.jsonl'}, line 3: {what}; mend or remove that line to go on"
    assert tree(run) == before


@pytest.mark.parametrize("content", [b"", b"steps = ", b"\xff\xfe", b"steps = -1\n"])
def test_damaged_settings_of_the_run_are_called_its_own(run: Path, tmp_path: Path, content: bytes) -> None:
    (run / "config.toml").write_bytes(content)
    before = tree(run)
    for resume in ("auto", str(run / "checkpoints" / NEWEST)):
        with pytest.raises(UserError) as error:
            open_run(make(tmp_path), resume)
        (line,) = str(error.value).splitlines()
        assert line.startswith(f"{run / 'config.toml'}: the settings that the run itself keeps are damaged")
        assert "--resume no" in line
        assert tree(run) == before
