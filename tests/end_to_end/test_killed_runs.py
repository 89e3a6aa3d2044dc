"""Real runs that are killed: started again they go on, and come to what they would have come to."""

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import Run, launch, survivors, train, until_step

from fleuve.control.journal import Answer
from fleuve.launch.history import History

SYNCHRONOUS = ["--control.max_staleness", "0", "--steps", "4", "--rollout.max_new_tokens", "64"]
ASYNCHRONOUS = ["--control.max_staleness", "2", "--steps", "6", "--rollout.max_new_tokens", "64"]


def kill(process: subprocess.Popen[str], number: int) -> str:
    """End it by a signal; what it said. None of its processes is left."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert survivors(family, within=10) == []
    return output


def known_answers(tmp_path: Path) -> dict[str, Answer]:
    """The whole answers of running groups that a run which is continued now would find."""
    root = tmp_path / "run"
    if not (root / "journal").exists():
        return {}
    reading = History(root / "checkpoints", root / "journal").open()
    reading.read_to_the_end()
    return {a.request_id: a for answers in reading.past.answers.values() for a in answers if a.finish_reason}


def final_state(run: Run, version: int) -> bytes:
    return (run.directory / "checkpoints" / f"step-{version:06d}" / "trainer.safetensors").read_bytes()


def assert_each_prompt_once(run: Run, groups: int) -> None:
    """Every group trained once, and they are those that the data begins with."""
    prompts = Counter((group["group"], group["prompt_id"]) for _, group, _ in run.answers)
    assert set(prompts.values()) == {4}  # answers
    assert sorted(group for group, _ in prompts) == list(range(groups))
    assert len({prompt for _, prompt in prompts}) == groups


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory) -> Run:
    run = train(tmp_path_factory.mktemp("whole"), *SYNCHRONOUS)
    assert run.code == 0, run.output
    return run


@pytest.mark.parametrize(
    ("number", "step", "after", "checkpoints"),
    [
        (signal.SIGKILL, 1, 0.15, 0),
        pytest.param(signal.SIGKILL, 2, 0.0, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 2, 0.1, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, 0.25, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, 0.05, 1, marks=pytest.mark.slow),
    ],
)
def test_a_synchronous_run_that_is_killed_and_continued_has_the_same_weights_to_the_last_bit(
    tmp_path, never_killed, number, step, after, checkpoints
):
    flags = [*SYNCHRONOUS, "--checkpoint.every", str(checkpoints)]
    process = launch(tmp_path, *flags)
    until_step(process, tmp_path, step)
    time.sleep(after)
    kill(process, number)
    run = train(tmp_path, *flags)
    assert run.code == 0, run.output
    assert "going on with the run" in run.output
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert_each_prompt_once(run, 16)
    assert final_state(run, 4) == final_state(never_killed, 4)


@pytest.mark.slow
def test_an_asynchronous_run_that_is_killed_twice_trains_each_prompt_once_and_goes_on_with_more_steps(tmp_path):
    for step in (1, 3):
        process = launch(tmp_path, *ASYNCHRONOUS)
        until_step(process, tmp_path, step)
        kill(process, signal.SIGKILL)
    run = train(tmp_path, *ASYNCHRONOUS)
    assert run.code == 0, run.output
    assert [row["step"] for row in run.metrics] == list(range(1, 7))
    assert_each_prompt_once(run, 24)
    elapsed = [row["time/elapsed"] for row in run.metrics]
    assert elapsed == sorted(elapsed)
    assert max(row["staleness/max"] for row in run.metrics) <= 2
    processes = {e["pid"] for e in json.loads((run.directory / "trace.json").read_text()) if e["ph"] == "X"}
    assert len(processes) >= 4  # of at least two lives

    longer = [*ASYNCHRONOUS[:3], "7", *ASYNCHRONOUS[4:]]
    more = train(tmp_path, *longer, "--trainer.learning_rate", "5e-4")
    assert more.code == 0, more.output
    assert "trainer.learning_rate was 0.001 and is 0.0005 from here on" in more.output
    assert [row["step"] for row in more.metrics] == list(range(1, 8))
    assert_each_prompt_once(more, 28)


@pytest.mark.slow
def test_a_trainer_that_is_killed_is_brought_back_and_the_run_comes_to_the_same(tmp_path, never_killed):
    process = launch(tmp_path, *SYNCHRONOUS)
    until_step(process, tmp_path, 2)
    (target,) = [p for p in psutil.Process(process.pid).children() if "fleuve.train" in p.cmdline()]
    target.kill()
    output, _ = process.communicate(timeout=120)
    run = Run(process.returncode, output, tmp_path / "run")
    assert run.code == 0, output
    assert "the trainer is lost" in output
    assert run.metrics[-1]["trainer/restarts"] == 1
    assert_each_prompt_once(run, 16)
    assert final_state(run, 4) == final_state(never_killed, 4)


@pytest.mark.slow
def test_whole_answers_of_groups_that_were_running_are_those_that_are_trained_after_a_kill(tmp_path):
    flags = ["--control.max_staleness", "2", "--steps", "2", "--rollout.max_new_tokens", "300"]
    process = launch(tmp_path, *flags)
    deadline = time.monotonic() + 60
    while len(known_answers(tmp_path)) < 4:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kill(process, signal.SIGKILL)
    known = known_answers(tmp_path)
    run = train(tmp_path, *flags)
    assert run.code == 0, run.output
    assert f"{len(known)} answers of running groups are there" in run.output
    assert_each_prompt_once(run, 8)
    trained = {f"{group['group']}/{sample}": answer for group, sample, answer in numbered(run)}
    for name, answer in known.items():
        assert trained[name]["output_ids"] == answer.output_ids.tolist()
        assert trained[name]["versions"] == answer.versions.tolist()
        assert trained[name]["logprobs"] == pytest.approx(answer.logprobs.tolist(), abs=1e-6)


def numbered(run: Run) -> Iterator[tuple[dict[str, Any], int, dict[str, Any]]]:
    """Group, number and answer of everything trained."""
    counts: Counter[int] = Counter()
    for _, group, answer in run.answers:
        yield group, counts[group["group"]], answer
        counts[group["group"]] += 1


@pytest.mark.slow
def test_a_trainer_that_hangs_is_killed_and_brought_back(tmp_path):
    process = launch(tmp_path, *ASYNCHRONOUS, "--trainer.health_timeout", "4")
    until_step(process, tmp_path, 2)
    (target,) = [p for p in psutil.Process(process.pid).children() if "fleuve.train" in p.cmdline()]
    target.send_signal(signal.SIGSTOP)
    output, _ = process.communicate(timeout=180)
    run = Run(process.returncode, output, tmp_path / "run")
    assert run.code == 0, output
    assert "the trainer is lost" in output
    assert_each_prompt_once(run, 24)


@pytest.mark.slow
def test_sigusr1_makes_a_checkpoint_and_the_run_goes_on_from_which_another_can_begin(tmp_path):
    process = launch(tmp_path, *ASYNCHRONOUS)
    until_step(process, tmp_path, 1)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    run = Run(process.returncode, output, tmp_path / "run")
    assert run.code == 0, output
    first, last = run.checkpoints
    assert last.name == "step-000006"
    version = int(first.name.split("-")[1])
    assert version < 6

    branch = train(tmp_path, *ASYNCHRONOUS, "--resume", str(first))
    assert branch.code == 0, branch.output
    assert [row["step"] for row in branch.metrics] == list(range(1, 7))
    assert (tmp_path / "run.1" / "checkpoints" / "step-000006" / "COMMITTED").exists()
    refused = train(tmp_path, "--resume", "run.1")
    assert refused.code == 2
    assert "did you mean run.1/checkpoints/step-000006" in refused.output
