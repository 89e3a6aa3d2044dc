"""Whole runs with real processes: what each setting promises, and how a run ends."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rescored import rescored
from runs import environment, family, start, survivors, train


def staleness(run) -> np.ndarray:
    return np.concatenate([start - np.asarray(answer["versions"]) for start, _, answer in run.answers])


@pytest.fixture(scope="module")
def run_with_every_version_kept(tmp_path_factory):
    run = train(tmp_path_factory.mktemp("kept"), "--steps", "6", "--checkpoint.every", "1", "--checkpoint.keep", "99")
    assert run.code == 0, run.output
    return run


def test_a_run_trains_every_step_and_leaves_its_directory_in_full(run_with_every_version_kept):
    run = run_with_every_version_kept
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert len(run.answers) == 6 * 4 * 4
    assert max(staleness(run)) <= 2
    names = {path.name for path in run.directory.iterdir()}
    assert {"config.toml", "metrics.jsonl", "rollouts", "trace.json", "checkpoints", "logs"} <= names
    assert {e["ph"] for e in json.loads((run.directory / "trace.json").read_text())} >= {"X", "C", "M"}
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run.checkpoints[-1] / "model")


def test_no_group_is_trained_twice(run_with_every_version_kept):
    ids = [group["group"] for _, group, _ in run_with_every_version_kept.answers]
    assert all(ids.count(i) == 4 for i in set(ids))


def test_recorded_logprobs_are_those_of_the_recorded_versions(run_with_every_version_kept):
    """Every token of every answer, re-scored with the weights of the version it is stamped with, interrupted or not."""
    worst, mixed = rescored(run_with_every_version_kept)
    assert mixed > 0
    assert worst < 1e-4


@pytest.mark.parametrize(
    ("flags", "bound"),
    [
        pytest.param(["--control.max_staleness", "0"], 0, marks=pytest.mark.slow),
        (["--control.max_staleness", "0", "--launch.placement", "colocated", "--rollout.workers", "2"], 0),
        pytest.param(["--control.max_staleness", "1", "--rollout.interrupt", "finish"], 1, marks=pytest.mark.slow),
        pytest.param(["--control.overdue", "drop", "--rollout.interrupt", "keep"], 2, marks=pytest.mark.slow),
        pytest.param(["--control.overdue", "mask", "--launch.placement", "colocated"], None, marks=pytest.mark.slow),
        pytest.param(
            ["--control.overdue", "train", "--weights.transport", "path", "--weights.path", "weights"],
            None,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_mode_ends_well_with_the_staleness_that_it_promises(tmp_path, flags, bound):
    (tmp_path / "weights").mkdir()
    run = train(tmp_path, *flags)
    assert run.code == 0, run.output
    assert len(run.metrics) == 5
    if bound is not None:
        assert max(staleness(run)) <= bound
        assert max(row["staleness/max"] for row in run.metrics) <= bound
    if "finish" in flags or bound == 0:
        assert all(len(set(answer["versions"])) == 1 for _, _, answer in run.answers)
    assert not list(tmp_path.glob("weights/fleuve-*"))


def test_ctrl_c_ends_a_run_within_10_seconds_with_a_checkpoint_and_no_process_left(tmp_path):
    process = start(tmp_path)
    processes = family(process)
    assert len(processes) >= 4  # controller, trainer, worker, verifier
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - asked < 10, output
    assert process.returncode == 130
    assert list((tmp_path / "run" / "checkpoints").glob("*/COMMITTED"))
    assert survivors(processes, within=1) == []


def test_no_process_survives_kill_9_of_the_parent(tmp_path):
    process = start(tmp_path)
    processes = family(process)
    process.kill()
    process.wait()
    assert survivors(processes, within=10) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no such oracle')", "no such oracle"),
        ("return float('nan')", "nan"),
        ("import time; time.sleep(1e6)", "0.3 s"),
    ],
)
def test_a_reward_function_that_never_gives_a_verdict_ends_the_run_and_says_why(tmp_path, body, said):
    (tmp_path / "broken.py").write_text(f"def score(text, answer, row):\n    {body}\n")
    flags = ["--data.verifier", "broken:score", "--reward.deadline", "0.3", "--control.max_failures_in_a_row", "2"]
    run = train(tmp_path, *flags, "--rollout.group_size", "2")
    assert run.code == 1
    assert "no verdict" in run.output
    assert said in run.output
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_full_disk_at_a_checkpoint_ends_the_run_with_one_line_and_keeps_the_earlier_ones(tmp_path):
    limited = Path(__file__).parent / "limited.py"
    from runs import command, write_config

    config = write_config(tmp_path)
    flags = ["--checkpoint.every", "1", "--observe.rollouts", "false", "--observe.trace", "false"]
    done = subprocess.run(
        [sys.executable, str(limited), *command(config, *flags)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode in (1, 2), output
    assert "error:" in output
    assert "checkpoints" in output
    assert not list((tmp_path / "run" / "checkpoints").glob("*/COMMITTED"))


@pytest.mark.slow
def test_ctrl_c_twice_ends_a_run_at_once_and_no_process_is_left(tmp_path):
    process = start(tmp_path)
    processes = family(process)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - asked < 5, output
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert survivors(processes, within=5) == []


@pytest.mark.slow
def test_a_closed_terminal_ends_a_run_with_a_checkpoint(tmp_path):
    process = start(tmp_path)
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert list((tmp_path / "run" / "checkpoints").glob("*/COMMITTED"))


@pytest.mark.slow
def test_dynamic_sampling_replaces_groups_without_signal_and_trains_only_the_others(tmp_path):
    """DAPO's preset; some three groups of ten tie at first."""
    run = train(tmp_path, "--algorithm.preset", "dapo", "--steps", "4")
    assert run.code == 0, run.output
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    rewards: dict[int, set[float]] = {}
    for _, group, answer in run.answers:
        rewards.setdefault(group["group"], set()).add(answer["reward"])
    assert len(rewards) == 4 * 4
    assert all(len(of_group) > 1 for of_group in rewards.values())
    last = run.metrics[-1]
    assert last["groups/dropped/no_signal"] > 0
    assert last["groups/dropped"] >= last["groups/dropped/no_signal"]
    assert any(0 < row.get("rollout/no_signal_fraction", 0) < 1 for row in run.metrics)
    assert all(row["loss/skipped_minibatches"] == 0 for row in run.metrics)
    assert max(staleness(run)) <= 2
