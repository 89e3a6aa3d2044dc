"""What a run leaves on disk, and what it shows."""

from __future__ import annotations

import io
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fleuve.config.loader import dump_settings, load_settings
from fleuve.config.settings import Settings
from fleuve.contracts import RunError
from fleuve.errors import UserError
from fleuve.observe.live import LineView, LiveView, sparkline, view_for
from fleuve.observe.metrics import MetricsFile, TensorBoard, read_metrics
from fleuve.observe.observer import RunObserver
from fleuve.observe.report import by_staleness, report, smooth, summarise
from fleuve.observe.rundir import RunDirectory, create_run_directory
from fleuve.observe.trace import Trace
from fleuve.types import Batch, Group, Prompt, Trajectory


def settings(run_dir: Path, **observe: object) -> Settings:
    return Settings.model_validate(
        {
            "run_dir": str(run_dir),
            "steps": 3,
            "model": {"path": "m"},
            "data": {"train": "d"},
            "observe": {"live": "off", **observe},
        }
    )


def batch(version: int) -> Batch:
    prompt = Prompt(id="row-7", input_ids=[5, 6], text="1+1?", answer="2")
    answer = Trajectory(
        prompt_ids=np.array([5, 6], np.int32),
        output_ids=np.array([1, 2, 3], np.int32),
        logprobs=np.array([-0.1, -0.25, -2.0], np.float32),
        versions=np.array([version, version, version + 1], np.int32),
        loss_mask=np.array([True, True, False]),
        finish_reason="stop",
        interruptions=1,
        reward=1.0,
        advantage=0.5,
        text="2",
    )
    return Batch(version=version, groups=[Group(id=40, prompt=prompt, trajectories=[answer], admitted_version=version)])


def metrics(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "reward/solved": step / 10, "staleness/mean": 1.5, "staleness/max": 2.0, **more}


def test_updates_that_are_skipped_for_not_being_finite_are_said_aloud(tmp_path: Path, capsys) -> None:
    config = settings(tmp_path / "run")
    run = create_run_directory(config.run_dir, dump_settings(config))
    with RunObserver(run, config) as observer:
        observer.step(metrics(1, **{"loss/skipped_nonfinite": 2.0}), batch(0))
    assert "step 1: 2 updates skipped" in run.log.read_text()
    assert "step 1: 2 updates skipped" in capsys.readouterr().out


def test_a_run_leaves_everything_in_its_directory(tmp_path: Path) -> None:
    config = settings(tmp_path / "run")
    run = create_run_directory(config.run_dir, dump_settings(config))
    clock = iter(range(100, 200))
    with RunObserver(run, config, clock=lambda: float(next(clock))) as observer:
        observer.span("trainer", "step 1", 101.0, 102.5, groups=1)
        observer.count("rollout/running", 4.0, 102.0)
        observer.note("hello")
        observer.step(metrics(1, **{"loss/policy": float("nan")}), batch(0))
        observer.step(metrics(2, **{"eval/test/pass@1": 0.5}), batch(1))

    assert load_settings(run.config) == config
    first, second = read_metrics(run.metrics)
    assert first["reward/solved"] == 0.1
    assert first["loss/policy"] is None
    assert first["time/elapsed"] == 1
    assert second == {**metrics(2, **{"eval/test/pass@1": 0.5}), "time/elapsed": 2}

    (line,) = run.rollout_file(1).read_text().splitlines()
    group = json.loads(line)
    assert (group["group"], group["prompt"], group["answer"], group["version"]) == (40, "1+1?", "2", 0)
    assert group["trajectories"] == [
        {
            "text": "2",
            "reward": 1.0,
            "advantage": 0.5,
            "finish_reason": "stop",
            "interruptions": 1,
            "excluded": "",
            "output_ids": [1, 2, 3],
            "versions": [0, 0, 1],
            "logprobs": [-0.1, -0.25, -2.0],
            "loss_mask": [1, 1, 0],
        }
    ]
    spans = [e for e in json.loads(run.trace.read_text()) if e["ph"] == "X"]
    assert [(s["name"], s["ts"], s["dur"], s["args"]) for s in spans] == [
        ("step 1", 1_000_000, 1_500_000, {"groups": 1})
    ]
    assert "hello" in run.log.read_text()


def test_tensorboard_reads_the_metrics_back(tmp_path: Path) -> None:
    config = settings(tmp_path / "run")
    run = create_run_directory(config.run_dir, "")
    with RunObserver(run, config) as observer:
        for step in (1, 2):
            observer.step(metrics(step), batch(step - 1))
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("reward/solved")] == [(1, 0.1), (2, 0.2)]


def write_steps(file: MetricsFile | TensorBoard, first: int, last: int) -> None:
    for step in range(first, last):
        file.write({"step": step, "reward/solved": 0.5})


def test_a_full_disk_is_met_where_the_writing_is_called_never_in_a_thread_of_its_own(tmp_path: Path) -> None:
    """On every file of the run that is written step by step; what was written before is still whole."""
    before = set(threading.enumerate())
    files: list[MetricsFile | TensorBoard] = [MetricsFile(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path / "board")]
    assert set(threading.enumerate()) == before
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for file in files:
        write_steps(file, 1, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
        try:
            with pytest.raises(OSError, match=r"No space left|too large"):
                write_steps(file, 2, 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        file.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    steps = [event.step for event in events.Scalars("reward/solved")]
    assert steps == list(range(1, len(steps) + 1))
    assert steps


def test_what_is_switched_off_is_not_written(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", tensorboard=False, rollouts=False, trace=False)
    run = create_run_directory(config.run_dir, "")
    with RunObserver(run, config) as observer:
        observer.span("trainer", "step", 0.0, 1.0)
        observer.step(metrics(1), batch(0))
    assert list(run.rollouts.iterdir()) == []
    assert not run.tensorboard.exists()
    assert not run.trace.exists()
    assert len(read_metrics(run.metrics)) == 1


def test_observing_does_not_import_torch() -> None:
    code = "import fleuve.observe.observer, fleuve.observe.metrics as m, sys, pathlib, tempfile;"
    code += "m.TensorBoard(pathlib.Path(tempfile.mkdtemp())).close(); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_a_killed_run_leaves_a_valid_trace_and_whole_metrics(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys, pathlib
        from fleuve.observe.metrics import MetricsFile
        from fleuve.observe.trace import Trace
        folder = pathlib.Path(sys.argv[1])
        trace, metrics = Trace(folder / "trace.json", 0.0), MetricsFile(folder / "metrics.jsonl")
        step = 0
        while True:
            step += 1
            trace.span("trainer", f"step {step}", step, step + 0.5, {})
            metrics.write({"step": step})
            if step % 3 == 0:
                trace.flush()
            if step == 300:
                print("go", flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(json.loads((tmp_path / "trace.json").read_text())) > 300
    assert len(read_metrics(tmp_path / "metrics.jsonl")) >= 300


def test_groups_in_flight_at_the_same_time_never_share_a_lane(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ends = np.sort(rng.uniform(1, 100, 200))
    trace = Trace(tmp_path / "trace.json", 0.0)
    for end in ends:
        trace.span("group", "row", max(0.0, end - rng.exponential(10)), end, {})
    trace.close()
    lanes: dict[int, list[tuple[int, int]]] = {}
    for event in json.loads((tmp_path / "trace.json").read_text()):
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, lanes.values())) == 200
    for spans in lanes.values():
        assert all(later[0] >= earlier[1] - 1 for earlier, later in itertools.pairwise(spans))


def test_a_run_that_is_there_already_is_moved_aside_not_lost(tmp_path: Path) -> None:
    for number in range(3):
        run = create_run_directory(tmp_path / "run", f"# {number}\n")
        run.release()
    assert run.moved_to == tmp_path / "run.2"
    assert (tmp_path / "run" / "config.toml").read_text() == "# 2\n"
    assert (tmp_path / "run.1" / "config.toml").read_text() == "# 0\n"
    assert (tmp_path / "run.2" / "config.toml").read_text() == "# 1\n"


def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path) -> None:
    run = create_run_directory(tmp_path / "run", "")
    with pytest.raises(UserError, match=rf"a run is going on in .*run \(process {os.getpid()}\)"):
        create_run_directory(tmp_path / "run", "")
    assert run.config.exists()


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds files that are not a run's"):
        create_run_directory(tmp_path, "")
    with pytest.raises(UserError, match=r"thesis\.tex is a file, not a directory"):
        create_run_directory(tmp_path / "thesis.tex" / "run", "")


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@needs_dev_full
def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", rollouts=False, tensorboard=False, trace=False)
    run = create_run_directory(config.run_dir, "")
    run.metrics.symlink_to("/dev/full")
    with RunObserver(run, config) as observer, pytest.raises(RunError, match="run: cannot be written: No space left"):
        observer.step(metrics(1), batch(0))


@needs_dev_full
@pytest.mark.parametrize("part", ["trace", "log"])
def test_a_run_goes_on_without_what_only_repeats_the_record_and_says_so_once(tmp_path: Path, capsys, part: str) -> None:
    config = settings(tmp_path / "run", tensorboard=False, rollouts=False)
    run = create_run_directory(config.run_dir, "")
    with RunObserver(run, config) as observer:
        file = getattr(run, part)
        full = os.open("/dev/full", os.O_WRONLY)
        if part == "trace":
            os.dup2(full, observer._trace._fd)  # type: ignore[union-attr]
        else:
            os.dup2(full, observer._log.fileno())  # type: ignore[union-attr]
        os.close(full)
        for step in range(1, 4):
            for number in range(300):
                observer.span("trainer", f"step {number}", 0.0, 1.0)
                observer.count("rollout/ready", 1.0, 1.0)
            observer.note(f"note {step}")
            observer.step(metrics(step), batch(step - 1))
    out = capsys.readouterr().out.replace("\n", " ")
    assert out.count("No space left on device; the run goes on without it") == 1
    assert str(file.name) in out
    assert "note 3" in out
    assert len(run.metrics.read_text().splitlines()) == 3


@needs_dev_full
def test_the_end_of_a_run_on_a_full_disk_raises_nothing(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", tensorboard=False)
    run = create_run_directory(config.run_dir, "")
    with RunObserver(run, config) as observer:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, observer._trace._fd)  # type: ignore[union-attr]
        os.dup2(full, observer._log.fileno())  # type: ignore[union-attr]
        os.close(full)
        observer.span("trainer", "step", 0.0, 1.0)
        # It ends here, without an error of its own that would stand in front of the one that ended the run.


def test_without_a_terminal_each_step_is_one_line(tmp_path: Path) -> None:
    out = io.StringIO()
    config = settings(tmp_path, live="auto")
    view = view_for(config, Console(file=out))
    assert isinstance(view, LineView)
    view.step(metrics(2, **{"rollout/interrupted": 3.0, "eval/test/pass@1": 0.25, "time/elapsed": 65.0}))
    view.note("[a] note")
    assert out.getvalue() == (
        "step 2/3  solved 0.20  staleness 1.50 (max 2)  interrupted 3  test/pass@1 0.250  1:05\n[a] note\n"
    )


def test_in_a_terminal_the_live_view_shows_who_does_what(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, record=True)
    config = settings(tmp_path, live="auto")
    view = view_for(config, console)
    assert isinstance(view, LiveView)
    view.start()
    view.activity("trainer", "step 3")
    view.activity("worker-0", "taking [version] 2")
    view.count("rollout/ready", 5.0)
    view.count("throughput/generated_tokens_per_second", 1234.0)
    for step in (1, 2):
        view.step(metrics(step, **{"throughput/trained_tokens_per_second": 987.0}))
    view.note("run [moved]")
    view.stop()
    console.print(view.render())
    shown = console.export_text()
    for text in (
        "step 2/3",
        "step 3",
        "taking [version] 2",
        "5 ready",
        "1,234",
        "987",
        "0.20",
        "max 2 of 2",
        "run [moved]",
    ):
        assert text in shown, text


def test_sparklines_span_the_given_range_and_average_what_does_not_fit() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10, 0.0, 1.0) == "▁▅█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2, 0.0, 1.0) == "▁█"
    assert sparkline([], 10, 0.0, 1.0) == ""


def test_a_report_sums_a_run_up_and_draws_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    rows = [
        {
            "step": i,
            "reward/solved": 0.2 if i <= 10 else 0.6,
            "staleness/mean": 1.0,
            "staleness/max": 2,
            "rollout/interrupted": 1,
            "tokens/trained": 100,
            "time/elapsed": 2.0 * i,
            **({"eval/held_out/pass@1": 0.1 * i} if i in (1, 5) else {}),
            "groups/dropped": 3,
            "groups/dropped/no_signal": 2,
            "groups/dropped/rollout_failed": 1,
            **_seen("3-4", 100.0, 0.25),
        }
        for i in range(1, 21)
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2')
    out = io.StringIO()
    picture = report(tmp_path, Console(file=out, width=100))
    text = out.getvalue()
    for expected in (
        "0.200 → 0.600",
        "0.100 → 0.500   (2 evaluations)",
        "mean 1.00, max 2",
        "20 answers",
        "2,000 tokens",
        "3 groups (2 no signal, 1 rollout failed)",
        "25.00%",
    ):
        assert expected in text, expected
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def _seen(bucket: str, tokens: float, clipped: float, **others: float) -> dict[str, float]:
    names = ("capped_fraction", "behaviour_weight_mean", "effective_sample_size", "kl_behaviour_proximal")
    values = {"tokens": tokens, "clip_fraction": clipped} | dict.fromkeys(names, 1.0) | others
    return {f"by_staleness/{name}/{bucket}": value for name, value in values.items()}


def test_a_report_shows_which_staleness_hurts() -> None:
    """Means over the tokens of the last steps, in the order of staleness; a bucket may be missing from a step."""
    rows = [
        {"step": 1.0, **_seen("9-16", 100.0, 0.5), **_seen("0", 300.0, 0.0)},
        {"step": 2.0, **_seen("2", 100.0, 0.1), **_seen("9-16", 300.0, 0.1, capped_fraction=0.2)},
    ]
    found = by_staleness(rows)
    assert list(found) == ["0", "2", "9-16"]
    assert found["9-16"]["clip_fraction"] == pytest.approx(0.2)
    assert found["9-16"]["capped_fraction"] == pytest.approx(0.4)
    assert [found[bucket]["tokens"] for bucket in found] == pytest.approx([3 / 8, 1 / 8, 4 / 8])


def test_a_report_of_what_is_no_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    with pytest.raises(UserError, match=r"quickstart holds no metrics\.jsonl"):
        report(tmp_path / "quickstart")
    with pytest.raises(UserError, match=r"no such run: .*quickstrat; did you mean .*quickstart\?"):
        report(tmp_path / "quickstrat")


def test_a_summary_of_few_metrics_leaves_the_others_out() -> None:
    names = [name for name, _ in summarise([{"step": 1, "time/step": 2.0, "time/wait_for_batch": 0.5}])]
    assert names == ["steps", "interrupted", "trainer waited"]


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    assert smooth([0.3, 0.9])[0] == pytest.approx(0.3)
    assert smooth([0.5] * 20) == pytest.approx([0.5] * 20)


FULL = """
import resource, sys
from pathlib import Path
from fleuve.observe.metrics import MetricsFile
file = MetricsFile(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
for step in range(100):
    file.write({"step": step, "reward/mean": 0.5})
"""


def test_where_the_disk_ends_in_the_middle_of_a_row_the_rows_before_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, str(file)], capture_output=True, text=True, check=False)
    assert "OSError" in done.stderr
    rows = read_metrics(file)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) >= 4
    assert file.read_text().endswith("}\n")
