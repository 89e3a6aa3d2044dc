"""What `fleuve train` does with the run directory that it finds."""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import left_runs
import pytest
from left_runs import make, read

from fleuve.config.changes import FIXED, TRAINING, WHERE, Changes
from fleuve.config.loader import dump_settings, load_settings, setting_names
from fleuve.config.settings import Settings
from fleuve.control.journal import Admitted, Ready, Step
from fleuve.errors import UserError
from fleuve.launch.journal import JournalFile
from fleuve.launch.resume import finished, open_run
from fleuve.launch.settle import settle
from fleuve.observe.rundir import continue_run_directory
from fleuve.types import Prompt


def leave_a_run(settings: Settings, steps: int) -> None:
    """As one that was killed after so many steps, another group in flight."""
    opened = open_run(settings, "no")
    journal = JournalFile(opened.run.journal, 0, print)
    for version in range(steps + 1):
        prompt = Prompt(id=f"p{version}", input_ids=[1], text="", answer="")
        journal.write(Admitted(group=version, prompt=prompt, version=version))
        if version < steps:
            journal.write(Ready(group=version, trajectories=[], admitted_version=version))
            journal.write(Step(version=version + 1, groups=[version], trained=[version]))
            with opened.run.metrics.open("a") as file:
                file.write(f'{{"step":{version + 1},"time/elapsed":{10.5 * (version + 1)}}}\n')
    journal.close()
    opened.run.release()


def test_a_run_that_is_there_is_gone_on_with(tmp_path):
    settings = make(tmp_path)
    leave_a_run(settings, 3)
    opened = open_run(settings, "auto")
    reading = read(opened, settings)
    assert (reading.version, reading.next, reading.steps) == (3, 10, 3)
    assert opened.earlier.steps == {1, 2, 3}
    assert opened.earlier.elapsed == 31.5
    assert "going on with the run" in opened.words()[0]
    opened.run.release()
    assert not (tmp_path / "run.1").exists()


def test_what_its_last_life_left_half_written_is_removed(tmp_path):
    settings = make(tmp_path)
    leave_a_run(settings, 3)
    run = tmp_path / "run"
    for folder in ("step-000002", "step-000003.part"):
        (run / "checkpoints" / folder / "model").mkdir(parents=True)
    (run / "metrics.jsonl.part").touch()
    opened = open_run(settings, "auto")
    assert settle(opened.run, read(opened, settings)) == []
    opened.run.release()
    assert list((run / "checkpoints").iterdir()) == []
    assert list(run.rglob("*.part")) == []


def test_what_a_run_left_half_written_when_it_was_killed_at_its_very_end_is_removed(tmp_path):
    settings = make(tmp_path)
    leave_a_run(settings, 3)
    checkpoints = tmp_path / "run" / "checkpoints"
    for folder in ("step-000007", "step-000010"):
        (checkpoints / folder).mkdir()
    assert not finished(settings)
    (checkpoints / "step-000010" / "COMMITTED").write_text('{"version": 10, "files": {}}')
    assert finished(settings)
    assert [path.name for path in checkpoints.iterdir()] == ["step-000010"]
    held = continue_run_directory(settings.run_dir)
    (checkpoints / "step-000007").mkdir()
    assert finished(settings)  # another process may be about to end it
    assert len(list(checkpoints.iterdir())) == 2
    held.release()


def test_a_synchronous_run_goes_back_to_the_beginning_of_the_wave_that_was_under_way(tmp_path):
    settings = make(tmp_path, control={"max_staleness": 0})
    leave_a_run(settings, 3)
    opened = open_run(settings, "auto")
    reading = read(opened, settings)
    assert (reading.version, reading.next) == (3, 9)
    opened.run.release()


@pytest.fixture(scope="module")
def opened_files() -> list[str]:
    """The names of all files that are opened from here on."""
    names: list[str] = []
    sys.addaudithook(lambda event, arguments: names.append(str(arguments[0])) if event == "open" else None)
    return names


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_journal_is_read_once(tmp_path, opened_files, staleness):
    settings = make(tmp_path, control={"max_staleness": staleness})
    leave_a_run(settings, 3)
    opened_files.clear()
    opened = open_run(settings, "auto")
    reading = read(opened, settings)
    JournalFile(opened.run.journal, reading.next, print).close()
    opened.run.release()
    written = f"{reading.next:012d}.bin"
    assert [Path(name).name for name in opened_files if "/journal/" in name] == ["000000000000.bin", written]


def test_with_resume_no_it_is_moved_aside(tmp_path):
    settings = make(tmp_path)
    leave_a_run(settings, 2)
    opened = open_run(settings, "no")
    assert (opened.continued, opened.words()) == (False, [])
    assert (tmp_path / "run.1" / "journal").exists()
    opened.run.release()


def test_a_directory_without_anything_to_go_on_from_is_moved_aside(tmp_path):
    settings = make(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(dump_settings(settings))
    open_run(settings, "auto").run.release()
    assert (tmp_path / "run.1" / "config.toml").exists()


def test_what_is_no_checkpoint_is_refused_and_nothing_touched(tmp_path):
    settings = make(tmp_path)
    leave_a_run(settings, 2)
    with pytest.raises(UserError, match="no whole checkpoint is there"):
        open_run(settings, str(tmp_path / "elsewhere"))
    assert not (tmp_path / "run.1").exists()


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"seed": 5}, "seed was 0 and is now 5"),
        ({"model": {"path": "other"}}, 'model.path was "m" and is now "other"'),
        ({"data": {"train": "other"}}, 'data.train was "d" and is now "other"'),
        ({"rollout": {"group_size": 4}}, "rollout.group_size was 8 and is now 4"),
        ({"control": {"batch_size": 32}}, "control.batch_size was 16 and is now 32"),
        ({"control": {"max_staleness": 1}}, "it can only be raised"),
    ],
)
def test_a_change_that_makes_it_another_run_is_refused_by_name_and_nothing_is_touched(tmp_path, tables, said):
    leave_a_run(make(tmp_path), 2)
    before = (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(UserError) as error:
        open_run(make(tmp_path, **tables), "auto")
    assert said in str(error.value)
    assert "--resume no" in str(error.value)
    assert (tmp_path / "run" / "config.toml").read_text() == before
    assert not (tmp_path / "run.1").exists()


def test_other_changes_are_taken_over_and_said_and_steps_are_made_again_by_the_former_values(tmp_path):
    leave_a_run(make(tmp_path), 2)
    new = make(tmp_path, steps=20, trainer={"learning_rate": 1e-4}, control={"max_staleness": 4})
    opened = open_run(new, "auto")
    assert opened.notes == [
        "control.max_staleness was 2 and is 4 from here on",
        "steps was 10 and is 20 from here on",
        "trainer.learning_rate was 1e-06 and is 0.0001 from here on",
    ]
    assert opened.former is not None
    assert opened.former.trainer.learning_rate == 1e-6
    opened.run.release()


def test_with_nothing_after_the_last_checkpoint_other_values_hold_from_the_start(tmp_path):
    settings = make(tmp_path)
    leave_a_run(settings, 0)
    (segment,) = (tmp_path / "run" / "journal").iterdir()
    segment.write_bytes(b"")
    opened = open_run(make(tmp_path, trainer={"learning_rate": 1e-4}), "auto")
    assert opened.former is None
    opened.run.release()


def test_reports_of_steps_that_are_not_in_the_journal_are_put_aside(tmp_path):
    settings = make(tmp_path)
    leave_a_run(settings, 2)
    run = tmp_path / "run"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"time/elapsed":99}\n{"step":4,"ti')
    for step in (1, 2, 3):
        (run / "rollouts" / f"step-00000{step}.jsonl").write_text("{}\n")
    opened = open_run(settings, "auto")
    with (run / "metrics.jsonl").open("a") as reports:  # they are open by then
        said = settle(opened.run, read(opened, settings))
        rows = '{"step":1,"time/elapsed":10.5}\n{"step":2,"time/elapsed":21.0}\n'
        assert (run / "metrics.jsonl").read_text() == rows
        assert sorted(path.name for path in (run / "rollouts").iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]
        aside = run / "superseded" / "1"
        assert (aside / "metrics.jsonl").read_text() == '{"step":3,"time/elapsed":99}\n'
        assert [path.name for path in (aside / "rollouts").iterdir()] == ["step-000003.jsonl"]
        assert said == [
            "step 3 had been reported, and cannot be reached any more: made anew",
            f"what cannot be used any more is kept in {aside}",
        ]
        reports.write('{"step":3}\n')
    assert (run / "metrics.jsonl").read_text() == rows + '{"step":3}\n'
    opened.run.release()


def test_every_setting_that_is_fixed_or_of_training_exists():
    names = setting_names(Settings)
    assert set(FIXED) <= set(names)
    assert {f"trainer.{name}" for name in WHERE} <= set(names)
    for prefix in TRAINING:
        assert any(name.startswith(prefix) for name in names)


@pytest.mark.parametrize("where", ["moved", "copied", "another spelling", "another working directory"])
def test_steps_are_made_again_where_the_run_is_now(tmp_path, monkeypatch, where):
    """By the former values of what a step depends on; by the new ones of what the trainer runs with."""
    leave_a_run(make(tmp_path, trainer={"threads": 8, "start_timeout": 1.0}), 2)
    run = tmp_path / "run"
    if where == "moved":
        run = run.rename(tmp_path / "elsewhere")
    elif where == "copied":
        run = Path(shutil.copytree(run, tmp_path / "elsewhere"))
    elif where == "another spelling":
        run = tmp_path / "x" / ".." / "run"
        (tmp_path / "x").mkdir()
    else:
        monkeypatch.chdir(tmp_path)
        run = Path("run")
    new = make(tmp_path, run_dir=str(run), trainer={"learning_rate": 1e-4, "threads": 1}, algorithm={"clip_low": 0.1})
    for _ in range(2):  # the same however often it is tried
        opened = open_run(new, "auto")
        former = opened.former
        assert former is not None
        assert former.run_dir == str(run)
        assert (former.trainer.learning_rate, former.algorithm.clip_low) == (1e-6, 0.2)
        assert (former.trainer.threads, former.trainer.start_timeout) == (1, new.trainer.start_timeout)
        opened.run.release()


@pytest.mark.parametrize("made", range(6))
def test_a_start_that_was_cut_short_is_in_nobody_s_way(tmp_path, made):
    run = tmp_path / "run"
    for folder in [run, run / "rollouts", run / "checkpoints", run / "logs"][:made]:
        folder.mkdir()
    if made >= 4:
        (run / ".lock").write_text("1\n")
    if made >= 5:
        (run / "config.toml.part").write_text("ste")
    settings = make(tmp_path)
    opened = open_run(settings, "auto")
    assert not opened.continued
    assert load_settings(run / "config.toml") == settings
    assert not (tmp_path / "run.1").exists()
    opened.run.release()


@pytest.mark.parametrize("theirs", ["notes.txt", "rollouts/mine.txt", "logs/run/x", "journal"])
def test_what_is_not_only_the_skeleton_of_a_run_is_somebody_s(tmp_path, theirs):
    file = tmp_path / "run" / theirs
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(UserError, match="holds files that are not a run's"):
        open_run(make(tmp_path), "auto")


def test_a_disk_that_is_full_for_the_settings_leaves_a_start_that_can_be_made_again(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            open_run(make(tmp_path), "auto")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "run" / "config.toml").exists()
    open_run(make(tmp_path), "auto").run.release()


def test_a_run_that_begins_from_a_checkpoint_has_the_reports_up_to_it(tmp_path):
    run = left_runs.leave_a_run(make(tmp_path), 8, saved=(3, 6))
    before = left_runs.tree(run)
    new = make(tmp_path, run_dir=str(tmp_path / "new"))
    opened = open_run(new, str(run / "checkpoints" / "step-000003"))
    reading = read(opened, new)
    assert settle(opened.run, reading) == []
    assert (opened.continued, opened.notes, reading.version) == (True, [], 3)
    assert opened.earlier.steps == {1, 2, 3}
    assert sorted(path.name for path in opened.run.rollouts.iterdir()) == [f"step-00000{n}.jsonl" for n in (1, 2, 3)]
    assert opened.run.rollout_file(3).read_bytes() == before["rollouts/step-000003.jsonl"]
    assert left_runs.tree(run) == before
    opened.run.release()
    again = open_run(new, "auto")  # it was killed before its first record
    assert read(again, new).version == 3
    assert again.notes == []
    again.run.release()


def test_a_checkpoint_that_is_damaged_is_nothing_to_begin_from(tmp_path):
    run = left_runs.leave_a_run(make(tmp_path), 8, saved=(3, 6))
    file = run / "checkpoints" / "step-000006" / "trainer.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError, match=r"no whole checkpoint is there: trainer.safetensors: not what was written"):
        open_run(make(tmp_path, run_dir=str(tmp_path / "new")), str(file.parent))
    assert not (tmp_path / "new").exists()


def test_equal_settings_have_no_changes(tmp_path):
    assert Changes(make(tmp_path), make(tmp_path / "moved")).values == {}
