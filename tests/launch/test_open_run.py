"""What `fleuve train` does with the run directory that it finds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleuve.config.changes import FIXED, TRAINING, Changes
from fleuve.config.loader import dump_settings, setting_names
from fleuve.config.settings import Settings
from fleuve.control.journal import Admitted, Ready, Step
from fleuve.errors import UserError
from fleuve.launch.history import Reading
from fleuve.launch.journal import JournalFile
from fleuve.launch.resume import Opened, finished, open_run
from fleuve.observe.earlier import cut_reports
from fleuve.observe.rundir import continue_run_directory
from fleuve.types import Prompt


def make(root: Path, **tables: object) -> Settings:
    values: dict[str, object] = {
        "run_dir": str(root / "run"),
        "steps": 10,
        "model": {"path": "m"},
        "data": {"train": "d"},
    }
    return Settings.model_validate(values | tables)


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


def read(opened: Opened, settings: Settings) -> Reading:
    """Its past, to the end."""
    reading = opened.history.open(whole=settings.reproducible)
    reading.read_to_the_end()
    return reading


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
    open_run(settings, "auto").run.release()
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


def test_reports_of_steps_that_are_not_in_the_journal_are_cut(tmp_path):
    settings = make(tmp_path)
    leave_a_run(settings, 2)
    run = tmp_path / "run"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"time/elapsed":99}\n{"step":4,"ti')
    (run / "rollouts" / "step-000003.jsonl").write_text("{}\n")
    (run / "rollouts" / "step-000002.jsonl").write_text("{}\n")
    opened = open_run(settings, "auto")
    with (run / "metrics.jsonl").open("a") as reports:  # they are open by then
        cut_reports(opened.run, read(opened, settings).version)
        rows = '{"step":1,"time/elapsed":10.5}\n{"step":2,"time/elapsed":21.0}\n'
        assert (run / "metrics.jsonl").read_text() == rows
        assert [path.name for path in (run / "rollouts").iterdir()] == ["step-000002.jsonl"]
        reports.write('{"step":3}\n')
    assert (run / "metrics.jsonl").read_text() == rows + '{"step":3}\n'
    opened.run.release()


def test_every_setting_that_is_fixed_or_of_training_exists():
    names = setting_names(Settings)
    assert set(FIXED) <= set(names)
    for prefix in TRAINING:
        assert any(name.startswith(prefix) for name in names)


def test_equal_settings_have_no_changes(tmp_path):
    assert Changes(make(tmp_path), make(tmp_path / "moved")).values == {}
