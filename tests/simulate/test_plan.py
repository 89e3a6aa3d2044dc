"""`fleuve plan`: what fits, what is fastest, and that the written file says the same."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from cluster import cluster
from rich.console import Console

from fleuve.config.loader import dump_changes, load_settings
from fleuve.config.preflight import preflight
from fleuve.config.settings import Settings
from fleuve.contracts import RunError
from fleuve.errors import UserError
from fleuve.simulate.candidates import candidates, misfit, staleness_below
from fleuve.simulate.estimate import bound, estimate, work_of
from fleuve.simulate.layout import layout_of
from fleuve.simulate.plan import CLOSE, Plan, Planned, find_plan, refusal
from fleuve.simulate.plan_report import check_writable, print_plan, write_plan
from fleuve.simulate.planned_run import OPTIONS, planned_run, unready
from fleuve.simulate.run import simulate
from fleuve.simulate.screen import fitting, screen
from fleuve.simulate.trainer_costs import TrainerCosts

LENGTHS = ["--simulate.lengths.mean", "300"]


@pytest.fixture(autouse=True)
def on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of several GPUs are checked as on a cluster, where Ray is."""
    monkeypatch.setattr("fleuve.config.preflight.require_ray", lambda: None)


def run(model: str = "qwen-1.5b", gpus: int = 8, answer: int = 1024, flags: list[str] = LENGTHS) -> Settings:
    return planned_run(model, gpus, "h100", 128, answer, batch_size=16, group_size=4, steps=100, flags=flags)


@cache
def planned() -> Planned:
    return find_plan(run(), most_stale=2, layouts=2)


def refused(settings: Settings) -> str:
    with pytest.raises(UserError) as error:
        find_plan(settings, most_stale=2)
    return str(error.value)


def test_a_32b_model_on_one_gpu_is_refused_in_one_line_with_the_reason_and_what_would_do() -> None:
    message = refused(run("qwen-32b", gpus=1))
    assert "\n" not in message
    assert "does not fit on 1 × h100: training on 1 needs" in message
    assert "590 GB for weights, gradients and optimiser" in message  # 18 bytes a parameter
    needed = int(message.rpartition("; ")[2].removesuffix(" of them would do"))
    assert fitting(run("qwen-32b", gpus=needed), 1)[0]


def test_what_would_do_is_near_the_least_that_does() -> None:
    settings = run("qwen-32b", gpus=2)
    needed = int(refused(settings).rpartition("; ")[2].split()[0])
    assert not fitting(run("qwen-32b", gpus=int(needed * 0.75)), 1)[0]


def test_answers_that_fit_on_no_number_of_devices_are_refused_with_a_length_that_does() -> None:
    settings = run("qwen-32b", gpus=8, answer=20_000_000)
    message = refused(settings)
    match = re.search(r"; answers of ([\d,]+) tokens would fit on (\d+) of them$", message)
    assert match is not None
    shorter, gpus = int(match[1].replace(",", "")), int(match[2])
    assert fitting(run("qwen-32b", gpus=gpus, answer=shorter), 1)[0]


def test_the_reason_is_that_of_the_candidate_that_comes_nearest() -> None:
    settings = run("qwen-32b", gpus=8)
    _, nearest = fitting(settings, 1)
    assert nearest is not None
    factors = [m.factor for c in candidates(settings, 1) if (m := misfit(c.apply(settings))) is not None]
    assert nearest.factor == min(factors) > 1
    assert nearest.reason in refusal(settings, nearest)


def test_every_candidate_uses_all_devices_in_whole_engines_and_ranks() -> None:
    settings = cluster(simulate={"gpus": 24, "rollout_gpus": None})
    found = list(candidates(settings, 4))
    assert {c.rollout_gpus for c in found} >= {None, 1, 12, 23}
    for candidate in found:
        layout = layout_of(candidate.apply(settings))  # raises where they are not whole
        assert layout.gpus == 24
        assert candidate.token_budget >= 128 + 1024


def test_ranks_have_whole_key_value_heads_and_only_vllm_has_engines_of_several_devices() -> None:
    settings = cluster("qwen-1.5b", simulate={"gpus": 16, "rollout_gpus": None})  # 12 heads, 2 key-value heads
    found = list(candidates(settings, 4))
    assert {c.tensor_parallel for c in found} == {1, 2, 4}
    assert {c.trainer_parallel for c in found} == {1, 2}
    embedded = cluster(rollout={"engine": "embedded"}, simulate={"gpus": 16, "rollout_gpus": None})
    assert {c.tensor_parallel for c in candidates(embedded, 4)} == {1}


@pytest.mark.parametrize("change", [{"algorithm": {"preset": "ppo"}}, {"lora": {"rank": 8}}])
def test_what_is_not_shared_out_over_ranks_gets_one_device(change: dict[str, dict[str, object]]) -> None:
    """A critic, and adapters."""
    settings = cluster("qwen-1.5b", **change, simulate={"gpus": 16, "rollout_gpus": None})
    assert {layout_of(c.apply(settings)).trainer_gpus for c in candidates(settings, 4)} == {1}


def test_many_nodes_are_split_by_whole_nodes() -> None:
    settings = cluster(simulate={"gpus": 128, "rollout_gpus": None})
    assert {c.rollout_gpus % 8 for c in candidates(settings, 1) if c.rollout_gpus} == {0}


def test_the_screen_finds_what_estimating_every_candidate_finds() -> None:
    settings = run(gpus=6)
    work = work_of(settings)
    fit, _ = fitting(settings, 2)
    slowly = sorted(estimate(r, work).step for _, r in fit)
    assert all(bound(r, work).step <= estimate(r, work).step * (1 + 1e-9) for _, r in fit)
    found = screen(fit, work, 3)
    assert found[0].estimate.step == slowly[0]
    assert len({s.candidate.rollout_gpus for s in found}) == 3


def test_the_bounds_of_staleness_that_are_looked_at_end_with_one_step_of_overlap() -> None:
    assert staleness_below(8) == [8, 4, 2, 1]
    assert staleness_below(3) == [3, 2, 1]
    assert staleness_below(1) == [1]


def test_the_best_plan_is_at_least_as_fast_as_the_runner_up_and_than_waiting_for_every_batch() -> None:
    found = planned()
    assert found.runner_up is not None
    assert found.synchronous is not None
    assert found.best.hours <= found.runner_up.hours
    assert found.best.hours < found.synchronous.hours
    assert found.synchronous.settings.control.max_staleness == 0


def test_the_least_staleness_is_chosen_that_is_as_fast() -> None:
    found = planned()
    chosen = found.best.settings.control.max_staleness
    fastest = min(found.staleness.values())
    assert found.staleness[chosen] <= fastest * (1 + CLOSE)
    assert all(hours > fastest * (1 + CLOSE) for looked_at, hours in found.staleness.items() if looked_at < chosen)


def test_longer_answers_take_longer() -> None:
    hours = {row.assumption: row.best for row in planned().sensitivity}
    assert hours["mean 210 (-30%)"] < planned().best.hours < hours["mean 390 (+30%)"]
    assert len(hours) == 4


def test_the_written_file_is_accepted_and_simulates_to_the_same_prediction(tmp_path: Path) -> None:
    best = planned().best
    path = tmp_path / "planned.toml"
    write_plan(path, best)
    settings = load_settings(path, ["--run_dir", str(tmp_path / "run")])
    assert settings.model_copy(update={"run_dir": best.settings.run_dir}) == best.settings
    assert simulate(settings).hours == best.hours
    assert all(line.startswith(("ok: ", "note: ")) for line in preflight(settings))


def test_settings_are_written_without_their_defaults_and_load_to_the_same(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    for algorithm in ({}, {"preset": "ppo"}, {"clip_low": 0.1}):
        settings = cluster(algorithm=algorithm)
        path.write_text(dump_changes(settings))
        assert load_settings(path) == settings
    assert "learning_rate" not in path.read_text()


def test_the_printed_plan_is_plain_where_it_is_piped_and_has_lines_in_a_terminal() -> None:
    piped, terminal = StringIO(), StringIO()
    print_plan(planned(), Console(file=piped, width=80))
    print_plan(planned(), Console(file=terminal, width=80, force_terminal=True))
    assert "│" not in piped.getvalue()
    assert "\x1b" not in piped.getvalue()
    assert "│" in terminal.getvalue()
    text = piped.getvalue()
    assert "answers of 300 tokens in the mean (lognormal, sigma 0.8)" in text
    for expected in (f"{planned().best.hours:.2f}", "runner-up", "synchronous", "rollout + training GPUs", "mean 390"):
        assert expected in text


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--control.max_staleness", "3"],
            "--control.max_staleness is for the plan to find; --max-staleness bounds it",
        ),
        (["--simulate.tensor_parallel=2"], "--simulate.tensor_parallel is for the plan to find"),
        (["--trainer.ranks", "2"], "--trainer.ranks is for the plan to find"),
        (["--simulate.gpus", "4"], "--simulate.gpus is what --gpus says; leave --simulate.gpus out"),
        (["--rollout.max_new_tokens=9"], "--rollout.max_new_tokens is what --answer says"),
        (["--control.batch_size", "8", *LENGTHS], "--control.batch_size is what --batch says"),
        (["--simulate.model", "qwen-7b"], "--simulate.model is what MODEL says"),
        (["--simulate.lenghts.mean", "3"], r"--simulate.lenghts.mean: unknown setting; did you mean"),
        (["--simulate.lengths.mean", "5000"], "is longer than the longest answer"),
    ],
)
def test_flags_that_cannot_be_are_one_line(flags: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        find_plan(run(flags=flags), most_stale=1)
    assert "\n" not in str(error.value)


def test_an_unknown_model_or_device_and_a_file_that_is_there_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"MODEL = qwen-32: .*did you mean qwen-32b\?"):
        run("qwen-32")
    with pytest.raises(UserError, match=r"--hardware = h10: .*did you mean h100\?"):
        planned_run("qwen-7b", 8, "h10", 128, 1024, 16, 4, 100)
    (tmp_path / "there.toml").touch()
    with pytest.raises(UserError, match="there is such a file already"):
        check_writable(tmp_path / "there.toml")
    with pytest.raises(UserError, match="no such directory"):
        check_writable(tmp_path / "missing" / "x.toml")


def test_every_option_of_the_command_that_is_a_setting_is_known_as_one() -> None:
    """`planned_run` puts them there: each value that is not a constant of its own."""
    given = planned_run("qwen-7b", 8, "h800", 123, 4567, 24, 3, 77, "procedural:chain")
    values = [given.simulate.gpus, given.simulate.hardware, given.simulate.prompt_tokens, given.rollout.max_new_tokens]
    values += [given.control.batch_size, given.rollout.group_size, given.steps, given.data.train, given.simulate.model]
    assert values == [8, "h800", 123, 4567, 24, 3, 77, "procedural:chain", "qwen-7b"]
    for key in OPTIONS:
        with pytest.raises(UserError, match=f"--{key} is what {OPTIONS[key]} says"):
            planned_run("qwen-7b", 8, "h800", 123, 4567, 24, 3, 77, flags=[f"--{key}", "1"])


def test_a_name_of_the_catalogue_goes_with_any_path_and_a_directory_only_with_its_own() -> None:
    assert run(flags=["--model.path", "models/mine"]).model.path == "models/mine"
    with pytest.raises(UserError, match=r"--model.path is what MODEL says"):
        run("builtin:small", flags=["--model.path", "models/mine"])


def only(settings: Settings) -> Plan:
    return find_plan(settings, most_stale=1, layouts=1, sensitivity=False).best


def test_a_model_given_by_its_file_is_the_directory_that_it_lies_in(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree("fleuve/assets/small", model)
    shutil.copy(model / "config.json", model / "shape.json")
    for name in ("config.json", "shape.json"):
        best = only(run(str(model / name), gpus=2, answer=64, flags=["--simulate.lengths.mean", "20"]))
        written = tmp_path / f"{name}.toml"
        write_plan(written, best)
        settings = load_settings(written, ["--run_dir", str(tmp_path / "run")])
        assert settings.model.path == str(model)
        assert all(line.startswith(("ok: ", "note: ")) for line in preflight(settings))
        assert simulate(settings).hours == best.hours
        assert "Set model.path" not in written.read_text()


def test_of_a_file_without_a_model_around_it_plan_and_note_say_what_to_set(tmp_path: Path) -> None:
    shutil.copy("fleuve/assets/small/config.json", tmp_path / "shape.json")
    settings = run(str(tmp_path / "shape.json"), gpus=2, answer=64, flags=["--simulate.lengths.mean", "20"])
    best = only(settings)
    write_plan(tmp_path / "plan.toml", best)
    expected = f"model.path = {tmp_path}: no config.json in it, so it is not a model directory. Set model.path to"
    assert unready(best.settings).startswith(expected)
    assert f"# {expected}" in (tmp_path / "plan.toml").read_text()
    assert simulate(load_settings(tmp_path / "plan.toml")).hours == best.hours


def test_the_planned_ranks_are_the_trainers_where_its_weights_can_be_shared_out(tmp_path: Path) -> None:
    for plan in planned().plans:
        assert plan.settings.trainer.ranks == layout_of(plan.settings).trainer_gpus
    critic = run(flags=[*LENGTHS, "--algorithm.preset", "ppo"])
    fit, _ = fitting(critic, 1)
    assert {r.trainer.ranks for _, r in fit} == {1}
    (tmp_path / "critic.toml").write_text(dump_changes(fit[0][1]))
    assert load_settings(tmp_path / "critic.toml") == fit[0][1]


@pytest.mark.parametrize(
    ("gpus", "complaint"),
    [(100_000, "plans are looked for on up to 8192 devices"), (6000, "devices beyond 1,152 would have nothing to do")],
)
def test_more_devices_than_could_have_anything_to_do_are_refused_at_once(gpus: int, complaint: str) -> None:
    settings = planned_run("qwen-1.5b", gpus, "h100", 100, 100, batch_size=4, group_size=32, steps=250)
    with pytest.raises(UserError, match=complaint):
        find_plan(settings, most_stale=1)


def test_ranks_without_anything_to_compute_do_not_slow_the_search_down() -> None:
    """They are all alike: counted once, however many."""
    few, many = (
        TrainerCosts.of(cluster("qwen-1.5b", simulate={"gpus": n + 8, "rollout_gpus": 8})) for n in (64, 16_000)
    )
    few, many = (replace(costs, hardware=replace(costs.hardware, node=1_000_000)) for costs in (few, many))
    started = time.process_time()
    assert many.step_seconds([[500] * 64] * 4) == pytest.approx(few.step_seconds([[500] * 64] * 4), rel=0.1)
    assert time.process_time() - started < 2


def test_a_deadline_that_no_plan_meets_is_said_with_the_plan() -> None:
    with pytest.raises(RunError, match=r"engines × .*, η 1, .*: the trainer: no answer to step 1 .* within 0\.1 s"):
        only(run(flags=[*LENGTHS, "--trainer.step_timeout", "0.1"]))


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def command(*words: str) -> subprocess.CompletedProcess[str]:
    options = ["--prompt", "128", "--answer", "256", "--batch", "4", "--group-size", "2", "--steps", "6"]
    return subprocess.run(
        [sys.executable, "-m", "fleuve", "plan", *words, *options], capture_output=True, text=True, timeout=120
    )


def test_the_command_prints_a_plan_and_writes_a_file_that_check_accepts(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    done = command("qwen-1.5b", "--gpus", "2", "--max-staleness", "1", "--layouts", "1", "--write", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "rollout + training GPUs" in done.stdout
    written = load_settings(path)
    assert (written.rollout.engine, written.launch.backend) == ("vllm", "ray")
    checked = subprocess.run(
        [sys.executable, "-m", "fleuve", "check", str(path), "--run_dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    missing = [] if has_ray() else ['error: launch.backend = "ray" needs Ray, which is not installed']
    assert [line.split(":")[0] + ":" + line.split(":")[1] for line in checked.stderr.splitlines()] == missing


def test_a_plan_that_only_fits_in_turn_on_several_gpus_says_that_it_cannot_be_trained() -> None:
    wanted = planned_run("qwen-7b", 2, "h200", 128, 512, batch_size=4, group_size=4, steps=10, flags=LENGTHS)
    best = only(wanted).settings
    assert best.launch.placement == "colocated"
    assert "on several GPUs is simulated, not trained" in unready(best)


def test_the_command_refuses_in_one_line_with_exit_code_2() -> None:
    done = command("qwen-32b", "--gpus", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: qwen-32b with sequences of 384 tokens does not fit on 1 × h100")


def test_arithmetic_alone_comes_near_to_the_simulation() -> None:
    for plan in (*planned().plans, planned().synchronous):
        assert plan is not None
        assert plan.estimate.step == pytest.approx(plan.result.step_seconds, rel=0.25)
